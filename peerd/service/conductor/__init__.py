"""The conductor as a service, and how members and trainers follow it."""
