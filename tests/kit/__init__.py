"""Shared test equipment: pairs of machines, memory hosts, torch set-up."""
