"""Kernels that several threads may share, and how many threads that are at this moment."""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable
from typing import Any

import numpy as np

from tandem.engine.compiling import compile_piece
from tandem.engine.team import Team

# How an argument of each kind becomes a word: an integer or address; a float32, in the low half.
_WORDS = {"i": "q", "f": "f4x"}


@functools.cache
def _team() -> Team:
    return Team()


_lender: Callable[[], int] | None = None


def borrow_from(lender: Callable[[], int] | None) -> None:
    """From now on kernels of this process may use `lender()` threads beyond their own; asked for each kernel."""
    global _lender
    _lender = lender


def threads_now(own: int) -> int:
    """How many threads a kernel may use that has `own`."""
    return own if _lender is None else own + _lender()


class Kernel:
    """Machine code for some items of a piece of work, compiled on first use.

    Whoever computes an item does it by the same code, so a result depends neither on the threads nor on how the work
    was cut.

    Args:
        function: `function(first, end, arguments)` computes the items `[first, end)`; `shared_words.words(n)` takes the
            arguments apart.
        words: the kinds of its arguments, a letter each: `i` an integer or an address, `f` a float32.
        fast_math: whether LLVM may reorder sums; NaN and infinity keep their meaning.
    """

    def __init__(self, function: Callable[[Any, Any, Any], None], words: str, *, fast_math: bool = False) -> None:
        self._function = function
        self._fast_math = fast_math
        self._pack = struct.Struct("=" + "".join(_WORDS[kind] for kind in words)).pack

    def __call__(self, num_threads: int, num_items: int, *arguments: float) -> None:
        """Compute the items `[0, num_items)` on up to `num_threads` threads, this one among them."""
        words = np.frombuffer(self._pack(*arguments), dtype=np.int64)
        _team().run(self._address, words, num_items, num_threads=num_threads)

    @functools.cached_property
    def _address(self) -> int:
        return compile_piece(self._function, fast_math=self._fast_math)
