"""The roles behind the library: a user's own training loop as a member of a run."""
