"""The model of a run: its layers, optimizer, precision, checkpoints, and the worker that computes."""
