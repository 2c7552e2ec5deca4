"""A trainer: its text, and its microbatches in the batches of the run."""
