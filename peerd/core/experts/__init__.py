"""Experts: their names in the grid, and the interface between a layer of experts and the network."""
