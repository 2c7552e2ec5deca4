"""Connections over a relay (circuits): the relay, its clients, and their limits."""
