"""Secure channels: the Noise handshake, the identity it proves, and multistream-select."""
