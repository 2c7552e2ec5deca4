"""Tensors as they travel: quantization, compression, error feedback."""
