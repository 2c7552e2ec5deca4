"""Layer 0: values and codecs. No trio, no torch, no clock, no randomness."""
