"""Layer 0: value types and codecs. No trio, no torch, no clock, no randomness."""
