"""Paths to peers behind NATs: reachability, hole punching, port mapping, relays, discovery in the local network."""
