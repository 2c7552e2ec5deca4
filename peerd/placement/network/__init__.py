"""The network between peers: each peer's measurements of its own links, and the conductor's map of all pairs."""
