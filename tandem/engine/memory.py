"""Host memory in huge pages, where the operating system has them.

A core that streams through memory fetches ahead only up to the end of a page: with pages of 4 KiB a decode step on the
CPU took a fifth longer.
"""

from __future__ import annotations

import contextlib
import mmap
import threading

import numpy as np
import torch

# Many weights go into one map: a huge page is 2 MiB, and only whole ones within a map are huge.
_CHUNK_BYTES = 64 << 20
_CACHE_LINE_BYTES = 64


def map_memory(num_bytes: int) -> torch.Tensor:
    """Zeros, `[num_bytes]` uint8, resident from the first touch on; aligned to a page of memory."""
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without transparent huge pages; only speed is lost
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.from_numpy(np.frombuffer(memory, dtype=np.uint8))


class WeightMemory:
    """Gives out places for weights, one behind the other; a map is freed with the last tensor in it."""

    def __init__(self) -> None:
        self._rest = torch.empty(0, dtype=torch.uint8)
        self._lock = threading.Lock()

    def empty(self, *shape: int) -> torch.Tensor:
        """Float32 that begins at a cache line; its content is unspecified."""
        count = int(torch.Size(shape).numel())
        num_bytes = -(-count * 4 // _CACHE_LINE_BYTES) * _CACHE_LINE_BYTES
        with self._lock:
            if len(self._rest) < num_bytes:
                self._rest = map_memory(max(num_bytes, _CHUNK_BYTES))
            place, self._rest = self._rest[:num_bytes], self._rest[num_bytes:]
        return place.view(torch.float32)[:count].view(shape)


weight_memory = WeightMemory()
"""Of this process."""
