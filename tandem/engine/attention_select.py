"""Which attention kernel serves: chosen once at load, by device and type, and named in the log."""

from __future__ import annotations

import torch

from tandem.engine.attention import AttentionBackend
from tandem.engine.attention_cpu import CPUAttention
from tandem.engine.attention_numba import can_attend
from tandem.engine.attention_reference import ReferenceAttention
from tandem.engine.layout import KVLayout


def select_backend(layout: KVLayout, device: torch.device, num_threads: int) -> AttentionBackend:
    """Return the kernel for this machine. Raises `ConfigError` if the page size does not suit the kernel."""
    if device.type == "cuda":
        from tandem.engine.attention_cuda import select_cuda_backend  # imports a GPU library

        return select_cuda_backend(layout, device)
    if layout.dtype == "float32" and can_attend(layout.head_dim):
        return CPUAttention(num_threads)
    return ReferenceAttention()
