"""What peers publish about a run, and who finds whom by it."""
