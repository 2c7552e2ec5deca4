"""Training data: corpora, token streams, mixtures, tokenizers."""
