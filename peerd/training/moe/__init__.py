"""A trainer of a run with experts: many microbatches on their way at once, each a task that waits for answers."""
