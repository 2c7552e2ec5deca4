"""Catching up: downloading a state, replaying steps, validation."""
