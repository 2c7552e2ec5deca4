"""A trainer that holds a replica of the whole model: what it does when its run is complete."""
