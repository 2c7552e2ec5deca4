"""Mixtures of experts over many hosts: model, calls, hosting, ownership, training."""
