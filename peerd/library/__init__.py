"""The library for users' own training loops: each class runs a peer in a background thread."""
