"""Budgets: what each peer, address and network has of this host's means."""
