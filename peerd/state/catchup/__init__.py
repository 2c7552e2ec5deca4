"""Catch-up of a member that is behind: downloads a state, replays steps, validates what it fetched."""
