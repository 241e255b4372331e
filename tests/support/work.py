"""Counts what a call does, which no other load on the machine changes; and the CPU time of what C functions do."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Any


def num_instructions(call: Callable[[], object]) -> int:
    """How many instructions the interpreter executes for it, in this thread. What C functions do counts as one each."""
    num = 0

    def trace(frame: FrameType, event: str, _argument: Any) -> Any:
        nonlocal num
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        num += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return num


def growth(call: Callable[[int], object], size: int) -> float:
    """How much more CPU time it takes for four times the size: about 4 where that is linear, 16 where it is a square.

    The least of three times each, and at least a millisecond: give a size for which a square would take some.
    """

    def cpu_s(size: int) -> float:
        began_s = time.thread_time()
        call(size)
        return time.thread_time() - began_s

    small, large = (min(cpu_s(of) for _ in range(3)) for of in (size, 4 * size))
    return large / max(small, 1e-3)
