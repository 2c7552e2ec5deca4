"""Parts of the daemon around its roles: control socket, connectivity, token files, and a guest's limits."""
