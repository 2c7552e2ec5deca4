"""Blockwise quantization: one definition (tables, reference), implemented in torch, C++ and CUDA."""
