"""Experts: what hosts claim and adopt, which requests make one batch, what is kept of updates that were made."""
