"""The process of a peer: starts its roles, serves its control socket, and stops them in order."""
