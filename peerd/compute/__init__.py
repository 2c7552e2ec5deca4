"""Layer 3': the only torch in peerd. May import core (and trio, for the worker)."""
