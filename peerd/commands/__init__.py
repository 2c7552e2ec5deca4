"""The command line's larger commands."""
