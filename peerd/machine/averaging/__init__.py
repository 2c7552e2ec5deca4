"""All-reduce: the plan of a round, its shares, grids and groups."""
