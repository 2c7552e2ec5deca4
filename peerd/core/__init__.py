"""Values and interfaces that all other rooms use: ids, addresses, keys, records, limits, errors. No I/O, no torch."""
