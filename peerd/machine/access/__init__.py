"""Runs with tokens: members, and what they may call and serve."""
