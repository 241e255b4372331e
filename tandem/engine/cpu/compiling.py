"""Machine code made by Numba and kept on disk for the next process."""

from __future__ import annotations

import functools
import hashlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
from numba import types
from numba.core.ccallback import CFunc

_log = logging.getLogger(__name__)

#: Calls the code with `[first, end)` and the address of its arguments.
_PIECE_OF_WORK = ((types.intp, types.intp, types.intp), types.void)

# Numba frees the code with its object, and others know the address only.
_held: list[CFunc] = []


def compile_function(function: Callable[..., Any]) -> Any:
    """A function that Python calls, as Numba's dispatcher; it runs without the GIL. Compiled on first use."""
    compiled: Any = numba.njit(function, nogil=True, error_model="numpy")
    _keep(compiled)
    return compiled


def compile_piece(function: Callable[[Any, Any, Any], None], *, fast_math: bool) -> int:
    """Address of the C function `function(first, end, arguments)`, all words, for good.

    Args:
        fast_math: whether LLVM may reorder sums; NaN and infinity keep their meaning.
    """
    options = {"error_model": "numpy", "fastmath": {"reassoc", "contract", "nsz", "arcp"} if fast_math else False}
    compiled = CFunc(function, _PIECE_OF_WORK, {}, options)
    _keep(compiled)
    compiled.compile()
    _held.append(compiled)
    address: int = compiled.address  # type: ignore[assignment]
    return address


def _keep(compiled: Any) -> None:
    try:
        compiled.enable_caching()
    except RuntimeError as error:  # no directory to write to: every process compiles anew
        _log.warning("compiled kernels cannot be cached: %s", error)
        return
    # Numba's own stamp covers the function's file only; most of a kernel's code comes from other files.
    index = compiled._cache._cache_file
    index._source_stamp = (index._source_stamp, _digest_of_sources())


@functools.cache
def _digest_of_sources() -> str:
    """Of all files that kernels may be put together from."""
    sources = sorted(Path(__file__).parent.parent.rglob("*.py"))
    return hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()
