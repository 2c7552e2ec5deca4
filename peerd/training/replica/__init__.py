"""A trainer with a replica of the whole model: its final state when its run is complete."""
