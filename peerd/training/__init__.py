"""A peer's part of a run: what roles are made of."""
