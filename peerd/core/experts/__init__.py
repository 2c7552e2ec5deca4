"""Experts by name: their grid, and what a layer of experts asks of the network."""
