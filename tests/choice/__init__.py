"""Which tests a run takes, in which order, and beside which others."""
