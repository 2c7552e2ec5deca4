"""Events, orders and members: what the conductor's parts share."""
