"""What users import into training loops of their own; each file stands for itself, with a peer in the background."""
