"""Numba's thread pool: how kernels are compiled, and launched one at a time."""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any

import numba

_log = logging.getLogger(__name__)

# Numba's own thread pool: present everywhere (OpenMP's library is not), and its idle threads sleep. It aborts the
# process when two threads launch kernels at once, so every launch holds this lock.
numba.config.THREADING_LAYER = "workqueue"
_LAUNCH = threading.Lock()

# Lets LLVM put a loop's sums on vector units; NaN and infinity keep their meaning.
_FASTMATH = {"reassoc", "contract", "nsz", "arcp"}


def _digest_of_sources() -> str:
    """Of all files that kernels may be put together from."""
    sources = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()


_SOURCES = _digest_of_sources()


class Kernel:
    """A function for Numba, whose outermost `prange` may go over several threads.

    Without fast math: a result must not depend on how LLVM arranged one of the two variants.
    """

    def __init__(self, function: Callable[..., None]) -> None:
        self._alone = compile_kernel(parallel=False, fast_math=False)(function)
        self._together = compile_kernel(parallel=True, fast_math=False)(function)

    def __call__(self, num_threads: int, *arguments: Any) -> None:
        """Run on `num_threads` threads, at most the machine's."""
        if num_threads == 1:
            self._alone(*arguments)
        else:
            launch(num_threads, self._together, *arguments)


def compile_kernel(*, parallel: bool, fast_math: bool = True) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A decorator: machine code on first use, kept on disk for the next process."""
    options = {
        "parallel": parallel,
        "nogil": True,
        "error_model": "numpy",
        "fastmath": _FASTMATH if fast_math else False,
    }

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        if parallel:  # under a name of its own: Numba's files do not tell the variants of a function apart
            function = FunctionType(function.__code__, function.__globals__)
            function.__qualname__ += "_parallel"
        try:
            compiled: Any = numba.njit(function, cache=True, **options)
        except RuntimeError as error:  # no directory to write to: every process compiles anew
            _log.warning("compiled kernels cannot be cached: %s", error)
            return numba.njit(function, **options)  # type: ignore[no-any-return]
        # Numba's stamp is of the function's own file only; most of a kernel's code comes from others.
        index = compiled._cache._cache_file
        index._source_stamp = (index._source_stamp, _SOURCES)
        return compiled  # type: ignore[no-any-return]

    return decorate


def launch(num_threads: int, kernel: Callable[..., None], *arguments: Any) -> None:
    """Run a parallel kernel on `num_threads` threads, at most the machine's."""
    with _LAUNCH:
        numba.set_num_threads(max(1, min(num_threads, numba.config.NUMBA_NUM_THREADS)))
        kernel(*arguments)
