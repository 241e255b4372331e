"""Kernels for CPUs, put together by Numba and LLVM, and the team of threads that computes them."""
