"""The simulated world: memory transport, network model, virtual clock, churn."""
