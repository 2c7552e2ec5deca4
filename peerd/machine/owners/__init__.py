"""Owners of experts: which host owns one, by signed links between owners and by the networks that hold checkpoints."""
