"""Parts of a user's own training loop: the optimizer's outline and schedule, and the tail of gradient sums."""
