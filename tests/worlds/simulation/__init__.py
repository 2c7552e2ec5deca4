"""The simulator: in-memory transport, network model, virtual clock, churn."""
