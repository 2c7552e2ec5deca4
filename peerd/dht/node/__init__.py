"""Kademlia: routing table, lookups, records and their replication."""
