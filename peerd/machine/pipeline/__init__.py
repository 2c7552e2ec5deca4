"""A trainer's choice of stage peers."""
