"""Layer 3': all computing with torch: model, codec, data, experts, export. May import core, and trio for the worker."""
