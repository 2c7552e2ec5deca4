"""What the conductor's parts share: events, orders, and the members as it knows them."""
