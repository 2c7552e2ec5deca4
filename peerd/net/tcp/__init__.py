"""TCP: the transport, limits on the line, names and interfaces."""
