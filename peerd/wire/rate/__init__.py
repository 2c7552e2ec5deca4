"""Rates: estimates and limits of how fast bytes are sent and received."""
