"""Rebalancing: which peers move to another stage during training, and where a newcomer helps most."""
