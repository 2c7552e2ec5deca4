"""The model, its division into stages, and the optimizer."""
