"""The directory as a service: a Kademlia DHT over remote calls."""
