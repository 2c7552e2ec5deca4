"""This peer's part in the map of the network: measures its links, reports them, and reads the conductor's map."""
