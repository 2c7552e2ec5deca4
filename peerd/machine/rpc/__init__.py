"""Remote calls: the wire codec, declarations of methods, and the accounting of running calls."""
