"""Experts: claims and custody, merging of requests into batches, and the answers kept of completed updates."""
