"""Connections over a relay."""
