"""The contract between the daemon and a role, and the services of a run that a role is given."""
