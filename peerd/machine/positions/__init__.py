"""Positions of a run: what proves them, and the choice of the one that a swarm goes on from."""
