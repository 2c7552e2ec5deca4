"""Decisions about experts: claims and custody, merging of requests into batches, answers kept of completed updates."""
