"""Port mapping by home routers, with UPnP or NAT-PMP."""
