"""Positions of a run: how they are proven, and the choice of the one that a swarm resumes from."""
