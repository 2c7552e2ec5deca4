"""Services that find network paths to other peers: AutoNAT, DCUtR, relays, port mapping, LAN discovery."""
