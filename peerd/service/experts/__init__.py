"""Experts of a run over the network: who has which, calls to them, and their checkpoints."""
