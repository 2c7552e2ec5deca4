"""Training data: files, streams, mixtures."""
