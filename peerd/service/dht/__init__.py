"""The directory as a service: Kademlia over remote calls."""
