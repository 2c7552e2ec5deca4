"""Home routers: port mapping by UPnP and NAT-PMP."""
