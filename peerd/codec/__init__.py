"""Encoding of tensors for sending: quantization, compression, error feedback."""
