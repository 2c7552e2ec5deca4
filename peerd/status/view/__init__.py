"""Text and pictures of a status for users: the board, the progress line, metrics, the live screen."""
