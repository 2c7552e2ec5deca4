"""All-reduce inside a stage: the plan of a round, its shares, grids and groups, and the rounds themselves."""
