"""libp2p's protobuf messages: a strict reader of the wire format, and the few messages that peerd uses."""
