"""What a peer is that holds a part of a model: a member of a stage, its boundary, its checkpoints."""
