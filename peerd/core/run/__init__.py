"""The run file: its sections, and what makes sense in them."""
