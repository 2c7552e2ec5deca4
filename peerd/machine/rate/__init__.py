"""Rates: what estimates or limits how fast bytes move."""
