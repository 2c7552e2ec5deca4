"""Layer 2: connections and streams on trio. May import core and machine."""
