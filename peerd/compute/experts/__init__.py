"""Experts of a run: their blocks, an expert at work on its host, and the layer that mixes the answers of many."""
