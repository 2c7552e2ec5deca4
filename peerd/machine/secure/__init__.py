"""Secure channels: the Noise hand-shake and multistream-select."""
