"""The network between peers: what each measures of its own links, and the conductor's map of all pairs."""
