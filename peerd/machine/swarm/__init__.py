"""Events, outputs, posts and the roster: what the conductor's parts share."""
