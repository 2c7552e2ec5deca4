"""Giving and fetching state."""
