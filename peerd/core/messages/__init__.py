"""Messages of peerd's own protocols, as they travel: strict, bounded msgspec structs."""
