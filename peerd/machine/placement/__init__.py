"""Placement: which device serves which stage of a pipeline, and who follows whom."""
