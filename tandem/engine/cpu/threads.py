"""Kernels that several threads compute together."""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable
from typing import Any

import numpy as np

from tandem.engine.cpu.compiling import compile_piece
from tandem.engine.cpu.lending import lender_now
from tandem.engine.cpu.thread_team import CALL_WORDS, Team

# How an argument of each kind becomes a word: an integer or address; a float32, in the low half.
_WORDS = {"i": "q", "f": "f4x"}


@functools.cache
def _team() -> Team:
    return Team()


class Kernel:
    """Machine code for some items of a piece of work, compiled on first use.

    Every thread computes an item by the same code, so a result depends neither on the threads nor on how the work was
    cut.

    Args:
        function: `function(first, end, arguments)` computes the items `[first, end)`; `atomics.words(n)` takes the
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

    def compile(self) -> None:
        """Now, and not when it is first called."""
        _ = self._address

    def call(self, num_items: int, *arguments: float) -> bytes:
        """The computation of the items `[0, num_items)`, for `run`; memory that it names must stay until then."""
        return self._pack(self._address, self._num_words, num_items, self._items_to_share, *arguments)

    def __call__(self, own_threads: int, num_items: int, *arguments: float) -> None:
        """Compute the items `[0, num_items)`; see `run`."""
        run(own_threads, self.call(num_items, *arguments))

    @functools.cached_property
    def _address(self) -> int:
        return compile_piece(self._function, fast_math=self._fast_math)


def run(own_threads: int, *calls: bytes) -> None:
    """Compute calls of kernels, each when the one before it is done, without Python or its lock in between.

    Args:
        own_threads: how many threads compute, this one among them. Lent threads join them, and come and go between
            two kernels.
    """
    lender = lender_now()
    program = np.frombuffer(b"".join(calls), dtype=np.int64)
    if lender is None:
        _team().run(program, num_threads=own_threads, num_own=own_threads)
        return
    while program.size:
        num_done = _team().run(
            program,
            num_threads=own_threads + lender.borrow(),
            num_own=own_threads,
            wanted_back_at=lender.wanted_back_at,
            offered_at=lender.offered_at,
        )
        program = program[num_done:]
