"""Slices of threads, as this kernel tells them."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest

from tandem.core import slices
from tandem.core.slices import take_short_slices

_T = TypeVar("_T")
_GETATTR = {"x86_64": 315, "aarch64": 275, "arm64": 275}


def in_a_thread(call: Callable[[], _T]) -> _T:
    """Of its own: what it says of itself ends with it."""
    with ThreadPoolExecutor(1) as executor:
        return executor.submit(call).result()


def slice_ns(tid: int = 0) -> int:
    """Of a thread, by default this one; 0: the kernel does not tell it."""
    attr = slices._SchedAttr()
    size = ctypes.sizeof(attr)
    assert ctypes.CDLL(None).syscall(_GETATTR[platform.machine()], tid, ctypes.byref(attr), size, 0) == 0
    return int(attr.runtime)


def tells_slices() -> bool:
    """Linux 6.12 and later do."""
    return platform.machine() in _GETATTR and in_a_thread(lambda: take_short_slices() and slice_ns() > 0)


#: Marks tests of what older kernels do not have.
needs_slices = pytest.mark.skipif(not tells_slices(), reason="this kernel has no slices for threads")

#: What `take_short_slices` takes.
SHORT_NS = 100_000
