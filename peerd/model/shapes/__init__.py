"""Sizes of a run's model, from its run file alone: shapes, stages, FLOPs, bytes, memory. No torch."""
