"""Layer 3': the only code in peerd that uses torch. May import core (and trio, for the worker)."""
