"""Training data: files, streams and mixtures."""
