"""Members of a run: posts, the roster, the directory, and the links between members."""
