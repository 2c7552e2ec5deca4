"""libp2p's own messages: a strict reader of the protobuf wire form, and the few messages that peerd speaks."""
