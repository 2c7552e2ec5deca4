"""Parts of the daemon around its roles: control socket, connectivity, opening hours, and a guest's limits."""
