"""A stage peer: serves stages of the model, and executes the conductor's orders."""
