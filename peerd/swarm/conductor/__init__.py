"""The conductor's service, which peer conducts, and the client with which peers find and follow it."""
