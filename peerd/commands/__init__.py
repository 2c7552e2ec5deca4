"""Larger commands of the command line."""
