"""Kernels and captured steps for CUDA; attention by FlashAttention, torch or Triton."""
