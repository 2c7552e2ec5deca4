"""What a member does in averaging rounds: stage peers bring their sums, helpers sum parts for others."""
