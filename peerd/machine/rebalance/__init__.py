"""Rebalancing: which peers move to another stage while training goes on, and where a newcomer helps most."""
