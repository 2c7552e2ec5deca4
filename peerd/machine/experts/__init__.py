"""Experts: which host owns one, which callers' requests make one batch, what is kept of updates that were made."""
