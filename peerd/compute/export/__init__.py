"""The trained model outside peerd: gathering it from checkpoints, its folder, and what is done with it there."""
