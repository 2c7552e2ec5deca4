"""Records that peers publish about a run, and finding peers by these records."""
