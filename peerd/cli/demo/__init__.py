"""`peerd demo`: a whole swarm on one machine. One parent process starts, watches and stops its peers, and kills one."""
