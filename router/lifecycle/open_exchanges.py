"""The exchanges with clients that are under way, so that a drain can wait for them and end what does not end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class OpenExchanges:
    """A set of exchanges, each with a way to break it off."""

    def __init__(self) -> None:
        # Invariant: has one entry for each exchange under way.
        self._breakers: set[Callable[[str], None]] = set()
        self._none = asyncio.Event()
        self._none.set()

    @property
    def num(self) -> int:
        return len(self._breakers)

    @contextmanager
    def entered(self, break_off: Callable[[str], None]) -> Iterator[None]:
        """Inside, the exchange is under way; `break_off(why)`, its own, makes it end soon with a typed error."""
        self._breakers.add(break_off)
        self._none.clear()
        try:
            yield
        finally:
            self._breakers.discard(break_off)
            if not self._breakers:
                self._none.set()

    async def wait_none(self) -> None:
        """Return when nothing is under way."""
        await self._none.wait()

    def break_off(self, why: str) -> None:
        """End all of them; their clients get an error that says why."""
        for breaker in self._breakers:
            breaker(why)
