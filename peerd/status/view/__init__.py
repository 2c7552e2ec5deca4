"""What users read of a status: the board, the progress line, metrics, live pictures."""
