"""Counts what a call does, which no other load on the machine changes."""

from __future__ import annotations

import sys
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
