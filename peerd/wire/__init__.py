"""Connections: transports, links, the host, and the rates and budgets of each."""
