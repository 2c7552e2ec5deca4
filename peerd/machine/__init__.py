"""Layer 1: protocol and policy as plain objects with `now` as an argument. May import core only."""
