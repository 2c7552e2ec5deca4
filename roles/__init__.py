"""Role plug-ins, found through the entry point group `peerd.roles`. Nothing imports them by name."""
