"""Which attention kernel serves: chosen once at load, by device and type, and named in the log."""

from __future__ import annotations

import torch

from tandem.engine.attention.interface import AttentionBackend
from tandem.engine.attention.reference import ReferenceAttention
from tandem.engine.cpu.attention import CPUAttention
from tandem.engine.cpu.attention_kernel import can_attend
from tandem.engine.layout import KVLayout


def select_backend(layout: KVLayout, device: torch.device, num_threads: int) -> AttentionBackend:
    """Return the kernel for this machine. Raises `ConfigError` if the page size does not suit the kernel."""
    if device.type == "cuda":
        from tandem.engine.cuda.attention import select_cuda_backend  # imports a GPU library

        return select_cuda_backend(layout, device)
    if layout.dtype == "float32" and can_attend(layout.head_dim):
        return CPUAttention(num_threads)
    return ReferenceAttention()
