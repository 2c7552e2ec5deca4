"""libp2p's protobuf messages for AutoNAT, circuits and hole punching."""
