"""A run: its run file and the validation of its values, its home on disk, and the user's code that it names."""
