"""`peerd demo`: a whole swarm on one machine, started, watched, hurt and stopped by one parent process."""
