"""Three worlds in which tests happen: machines alone, virtual time (network, roles), real processes."""
