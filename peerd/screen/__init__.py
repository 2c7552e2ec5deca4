"""Output for people on a terminal: words and units, charts, and pictures that fit the room there is."""
