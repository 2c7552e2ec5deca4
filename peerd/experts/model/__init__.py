"""Experts of a run: their blocks, a hosted expert, and the layer that mixes the outputs of many experts."""
