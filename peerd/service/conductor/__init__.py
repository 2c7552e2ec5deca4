"""The conductor's service, and the client with which members and trainers find and follow the conductor."""
