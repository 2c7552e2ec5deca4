"""Budgets: how much of this host's resources each peer, address and network may use."""
