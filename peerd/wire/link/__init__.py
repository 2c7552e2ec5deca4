"""Links: authenticated connections, and the streams on them."""
