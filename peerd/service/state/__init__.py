"""Serving and fetching states."""
