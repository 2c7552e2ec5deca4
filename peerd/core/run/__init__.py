"""The run file: its sections, and the validation of their values."""
