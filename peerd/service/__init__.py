"""Layer 3: one long-lived task each, over the host. May import core, machine and net; never torch."""
