"""Services that find ways to other peers: AutoNAT, DCUtR, relays, port mapping, LAN discovery."""
