"""Kademlia: routing table, look-ups, records and their replication."""
