"""Kernels that several threads may share, and how many threads that are at this moment."""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable
from typing import Any

import numpy as np

from tandem.engine.compiling import compile_piece
from tandem.engine.team import CALL_WORDS, Team

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
        items_to_share: fewer than these go on one thread: their start on others costs more than it saves.
    """

    def __init__(
        self,
        function: Callable[[Any, Any, Any], None],
        words: str,
        *,
        fast_math: bool = False,
        items_to_share: int = 2,
    ) -> None:
        self._function = function
        self._fast_math = fast_math
        self._items_to_share = items_to_share
        self._num_words = CALL_WORDS + len(words)
        self._pack = struct.Struct(f"={CALL_WORDS}q" + "".join(_WORDS[kind] for kind in words)).pack

    def call(self, num_items: int, *arguments: float) -> bytes:
        """The computation of the items `[0, num_items)`, for `run`; memory that it names must outlive that."""
        return self._pack(self._address, self._num_words, num_items, self._items_to_share, *arguments)

    def __call__(self, num_threads: int, num_items: int, *arguments: float) -> None:
        """Compute the items `[0, num_items)` on up to `num_threads` threads, this one among them."""
        run(num_threads, self.call(num_items, *arguments))

    @functools.cached_property
    def _address(self) -> int:
        return compile_piece(self._function, fast_math=self._fast_math)


def run(num_threads: int, *calls: bytes) -> None:
    """Compute calls of kernels, each when the one before it is done, without Python or its lock in between."""
    _team().run(np.frombuffer(b"".join(calls), dtype=np.int64), len(calls), num_threads=num_threads)
