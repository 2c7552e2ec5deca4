"""Blockwise quantization: one definition (tables, reference) and its implementations in torch, C++ and CUDA."""
