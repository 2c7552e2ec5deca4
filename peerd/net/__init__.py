"""Layer 2: trio drivers for connections and streams. May import core and machine."""
