"""Connections over a relay (circuits)."""
