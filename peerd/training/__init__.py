"""The parts of a peer in a run, from which the roles are built."""
