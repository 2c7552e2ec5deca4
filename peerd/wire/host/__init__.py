"""The host: one peer's links, dialing, listening and identify."""
