"""The conductor's service, its election, and the client with which peers find and follow it."""
