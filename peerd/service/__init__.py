"""Layer 3: services over the host, each a long-lived task. May import core, machine and net; never torch."""
