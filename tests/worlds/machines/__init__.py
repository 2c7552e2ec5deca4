"""Machines without a network: their inputs and the time come from the test, hosts are pretended."""
