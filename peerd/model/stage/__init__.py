"""A stage of the model: its part of the layers, forward and backward passes, and the memory that they take."""
