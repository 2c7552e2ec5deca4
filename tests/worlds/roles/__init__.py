"""Real roles of a run on a simulated network, in virtual time."""
