"""Decisions of the conductor: the swarm's position, its steps, and the averaging of each stage."""
