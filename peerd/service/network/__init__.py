"""A peer's part in the map of the network between peers: it measures its links, reports, and reads the map."""
