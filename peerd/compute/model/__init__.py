"""The model, cut into stages, and the optimizer."""
