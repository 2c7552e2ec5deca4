"""Secure channels: the Noise handshake and multistream-select."""
