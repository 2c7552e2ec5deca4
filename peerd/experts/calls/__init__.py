"""Experts on the network: their directory, calls to them, hosts that serve them, and holders of their checkpoints."""
