"""Waiting for what can only be looked at: what other threads and processes do. Events are awaited instead."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

_T = TypeVar("_T")

#: What comes in milliseconds may take so long where many others want the cores; only a hang takes longer.
LONG_S = 60.0

#: How many times a bound of the failure contract may take: tests share the host's cores.
SLACK = 3.0


def wait_until(
    look: Callable[[], _T],
    what: object,
    timeout_s: float = LONG_S,
    *,
    wanted: Callable[[_T], object] = bool,
    every_s: float = 0.01,
    more: Callable[[], str] = str,
) -> _T:
    """Look until `wanted` says yes of what is seen, and return that.

    Args:
        what: what is waited for, in words.
        more: what a failure tells besides, logs for one.

    Raises:
        AssertionError: it did not come; says what was waited for, and what was seen last.
    """
    deadline_s = time.monotonic() + timeout_s
    while not wanted(seen := look()):
        assert time.monotonic() < deadline_s, _late(what, timeout_s, seen, more())
        time.sleep(every_s)
    return seen


async def until(
    look: Callable[[], _T | Awaitable[_T]],
    what: object,
    timeout_s: float = LONG_S,
    *,
    wanted: Callable[[_T], object] = bool,
    every_s: float = 0.002,
) -> _T:
    """As `wait_until`, while the loop goes on; `look` may be a coroutine function."""
    deadline_s = time.monotonic() + timeout_s
    while not wanted(seen := await _seen(look)):
        assert time.monotonic() < deadline_s, _late(what, timeout_s, seen)
        await asyncio.sleep(every_s)
    return seen


async def _seen(look: Callable[[], _T | Awaitable[_T]]) -> _T:
    found = look()
    return await found if inspect.isawaitable(found) else found


def _late(what: object, timeout_s: float, seen: object, more: str = "") -> str:
    return f"{what} did not come within {timeout_s:g} s; seen last: {seen!r}{more and f'; {more}'}"


def nothing(seen: object) -> bool:
    """`wanted` of whoever waits until nothing is left."""
    return not seen
