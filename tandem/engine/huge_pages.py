"""Host memory in huge pages, where the operating system has them.

A core that streams through memory fetches ahead only up to the end of a page: with pages of 4 KiB a decode step on the
CPU took a fifth longer.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import os
import threading

import numpy as np
import torch

_log = logging.getLogger(__name__)

FLOAT_BYTES = 4
#: What memory is read by.
LINE_BYTES = 64
HUGE_PAGE_BYTES = 2 << 20

# Many weights go into one map: a huge page is 2 MiB, and only whole ones within a map are huge.
_CHUNK_BYTES = 64 << 20

_MADV_POPULATE_WRITE, _MADV_COLLAPSE = 23, 25
_madvise = ctypes.CDLL(None, use_errno=True).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def map_memory(num_bytes: int) -> torch.Tensor:
    """Zeros, `[num_bytes]` uint8, resident from the first touch on; aligned to a page of memory."""
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without transparent huge pages; only speed is lost
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.from_numpy(np.frombuffer(memory, dtype=np.uint8))


def populate(memory: torch.Tensor) -> None:
    """Make it resident, whatever it holds; others may read and write it meanwhile. Does not hold Python's lock.

    Raises:
        OSError: there is no memory, or the operating system cannot do that (Linux before 5.14).
    """
    start, end = memory.data_ptr(), memory.data_ptr() + memory.nbytes
    start -= start % mmap.PAGESIZE
    if _madvise(start, end - start, _MADV_POPULATE_WRITE) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


def collapse(memory: torch.Tensor) -> None:
    """Make huge pages of what is resident. Others may read it meanwhile. Does not hold Python's lock."""
    start, end = memory.data_ptr(), memory.data_ptr() + memory.nbytes
    why = ""
    for begin in range(start, end, _CHUNK_BYTES):
        if _madvise(begin, min(_CHUNK_BYTES, end - begin), _MADV_COLLAPSE) != 0:
            why = os.strerror(ctypes.get_errno())
    if why:  # Linux before 6.1, or no memory in one piece: only speed is lost
        _log.info("some weights stay in small pages: %s", why)


class WeightMemory:
    """Gives out places for weights, one behind the other; a map is freed with the last tensor in it."""

    def __init__(self) -> None:
        self._rest = torch.empty(0, dtype=torch.uint8)
        self._lock = threading.Lock()

    def empty(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """Numbers that begin at a cache line; their content is unspecified."""
        count = int(torch.Size(shape).numel())
        num_bytes = -(-count * dtype.itemsize // LINE_BYTES) * LINE_BYTES
        with self._lock:
            if len(self._rest) < num_bytes:
                self._rest = map_memory(max(num_bytes, _CHUNK_BYTES))
            place, self._rest = self._rest[:num_bytes], self._rest[num_bytes:]
        return place.view(dtype)[:count].view(shape)


weight_memory = WeightMemory()
"""Of this process."""
