"""A user's own training loop as a member of a run."""
