"""How soon a thread gets a core that has become ready while others compute.

Linux gives a core to whoever's time slice ends first among those that have had less than their share. All have slices
of some milliseconds, so where more threads compute than there are cores, one that only passes something on waits for
several of them, at each hop of a request. With a short slice it goes first; it gets no more of the core than before.
Linux 6.12 takes a slice for threads of no special policy ("EEVDF", Documentation/scheduler/sched-eevdf.rst); older ones
ignore it. Threads and processes inherit it from the thread that starts them: those that compute take the usual ones
again.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from concurrent.futures import ThreadPoolExecutor

_SHORT_NS = 100_000  # the shortest that there is

# sched_setattr(2) has no function in the C library.
_SYSCALLS = {"x86_64": 314, "aarch64": 274, "arm64": 274}
_SCHED_OTHER = 0


class _SchedAttr(ctypes.Structure):
    """`struct sched_attr` of `linux/sched/types.h`."""

    _fields_ = (
        ("size", ctypes.c_uint32), ("policy", ctypes.c_uint32), ("flags", ctypes.c_uint64), ("nice", ctypes.c_int32),
        ("priority", ctypes.c_uint32), ("runtime", ctypes.c_uint64), ("deadline", ctypes.c_uint64),
        ("period", ctypes.c_uint64), ("util_min", ctypes.c_uint32), ("util_max", ctypes.c_uint32),
    )  # fmt: skip


def take_short_slices() -> bool:
    """This thread passes things on: it gets a core soon. Whether that could be said."""
    return _set(_SHORT_NS)


def take_usual_slices() -> bool:
    """This thread computes. Whether that could be said."""
    return _set(0)


def computing_threads() -> ThreadPoolExecutor:
    """For a loop that takes short slices, in place of its own executor: what it gives away computes."""
    return ThreadPoolExecutor(thread_name_prefix="asyncio", initializer=take_usual_slices)


def _set(slice_ns: int) -> bool:
    number = _SYSCALLS.get(platform.machine()) if sys.platform == "linux" and sys.maxsize > 2**32 else None
    if number is None:
        return False
    try:
        if os.sched_getscheduler(0) != _SCHED_OTHER:
            return False
        nice = os.getpriority(os.PRIO_PROCESS, 0)
    except OSError:  # a sandbox that forbids the question
        return False
    attr = _SchedAttr(ctypes.sizeof(_SchedAttr), _SCHED_OTHER, 0, nice, runtime=slice_ns)
    failed: int = ctypes.CDLL(None).syscall(number, 0, ctypes.byref(attr), 0)
    return not failed
