"""The host: all links of one peer, dialing, listening, identify."""
