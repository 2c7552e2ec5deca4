"""Export of the trained model: gathering it from checkpoints, writing its folder, and using it from there."""
