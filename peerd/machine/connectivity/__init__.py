"""Paths to other peers: addresses, dialing, reachability, hole punching, relays."""
