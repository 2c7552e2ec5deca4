"""Declarations of remote methods, the wire codec of calls, and the accounting of running ones."""
