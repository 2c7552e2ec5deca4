"""Runs with tokens: who is a member, what members may call and serve, and the files of tokens."""
