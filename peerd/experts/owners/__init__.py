"""Ownership of experts: decided by signed links between owners, and by the networks that hold their checkpoints."""
