"""A trainer of a run with experts: many microbatches in flight, each a task that waits for experts' answers."""
