"""The conductor's decisions: positions, steps, and the closing of each stage."""
