"""The status of a peer and of its run as typed values, collected for `peerd status` and the progress line."""
