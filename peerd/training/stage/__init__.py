"""A stage peer: serving one stage, and the conductor's orders."""
