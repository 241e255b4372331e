"""Numba's thread pool: how kernels are compiled, and launched one at a time."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import numba

_log = logging.getLogger(__name__)

# Numba's own thread pool: present everywhere (OpenMP's library is not), and its idle threads sleep. It aborts the
# process when two threads launch kernels at once, so every launch holds this lock.
numba.config.THREADING_LAYER = "workqueue"
_LAUNCH = threading.Lock()

# Reassociation and contraction let the dot products use vector units; NaN and infinity keep their meaning, since
# the running maximum starts at minus infinity.
_FASTMATH = {"reassoc", "contract", "nsz", "arcp"}


def compile_kernel(*, parallel: bool) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A decorator: machine code on first use, kept on disk for the next process."""
    options = {"parallel": parallel, "nogil": True, "fastmath": _FASTMATH, "error_model": "numpy"}

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        try:
            compiled: Callable[..., None] = numba.njit(function, cache=True, **options)
        except RuntimeError as error:  # no directory to write to: every process compiles anew
            _log.warning("compiled kernels cannot be cached: %s", error)
            compiled = numba.njit(function, **options)
        return compiled

    return decorate


def launch(num_threads: int, kernel: Callable[..., None], *arguments: Any) -> None:
    """Run a parallel kernel on `num_threads` threads, at most the machine's."""
    with _LAUNCH:
        numba.set_num_threads(max(1, min(num_threads, numba.config.NUMBA_NUM_THREADS)))
        kernel(*arguments)
