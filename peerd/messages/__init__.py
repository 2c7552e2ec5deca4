"""Messages of peerd's own protocols, as strict, bounded msgspec structs."""
