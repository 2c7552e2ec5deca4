"""Real hosts, links and services on a simulated network, in virtual time."""
