"""The library for training loops of one's own: each class runs a peer in a background thread."""
