"""Sizes of a run's model, from its run file alone: shapes, cut into stages, work, bytes, memory. No torch."""
