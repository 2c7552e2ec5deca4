"""Averaging rounds of one peer: a stage peer sums its gradients with others, a helper sums parts for others."""
