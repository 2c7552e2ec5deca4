"""TCP: the transport, rate limits, name resolution and network interfaces."""
