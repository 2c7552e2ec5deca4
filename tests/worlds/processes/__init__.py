"""Real processes and sockets: peerd itself, users at a shell, foreign peers."""
