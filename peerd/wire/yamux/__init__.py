"""Yamux: many streams with flow control on one connection, striped over several TCP connections."""
