"""Checkpoints: saving, keeping for others, recovery."""
