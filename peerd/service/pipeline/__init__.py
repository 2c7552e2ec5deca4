"""A trainer's calls to the stages."""
