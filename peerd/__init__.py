"""peerd: pool computers over the internet to train neural networks together."""

__version__ = "0.1.0"
