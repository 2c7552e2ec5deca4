"""The daemon's surroundings: its control socket, connectivity and papers on disk."""
