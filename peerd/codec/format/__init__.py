"""The format of tensors on the wire, without arithmetic: frames and blockwise codes. No torch."""
