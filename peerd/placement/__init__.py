"""Placement: which device serves which stage of a pipeline, and which peer sends to which in the next stage."""
