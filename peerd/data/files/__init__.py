"""Files of training data: on this machine, compressed, or on a server."""
