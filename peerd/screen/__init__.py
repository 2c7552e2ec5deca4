"""Terminal output for users: numbers with units, charts, and pictures that fit the terminal's size."""
