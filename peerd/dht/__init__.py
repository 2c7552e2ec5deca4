"""The directory of a swarm: a Kademlia DHT over remote calls."""
