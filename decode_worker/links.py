"""The connections by which prefill workers write here: which one counts, and whether it is up. In the event loop."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from enum import Enum


class Closed(Enum):
    """Which connection a writer has closed."""

    NONE = "none"
    UNWRITTEN = "unwritten"  # pages never went by it
    WRITTEN = "written"  # bytes may be on their way


@dataclass(slots=True)
class _Link:
    number: int
    is_up: asyncio.Event = field(default_factory=asyncio.Event)


class WriterLinks:
    """One for each writer that has paired, by its incarnation. The writer numbers its connections; the next one comes
    when it has closed the one before."""

    def __init__(self) -> None:
        self._links: dict[str, _Link] = {}

    def begin(self, writer: str, number: int) -> Closed:
        """A writer is about to connect; which connection of its is closed for that."""
        known = self._links.get(writer)
        if known is not None and number <= known.number:  # a call that is repeated
            return Closed.NONE
        self._links[writer] = _Link(number)
        if known is None:
            return Closed.NONE
        # A writer posts on its first connection at once, and on a later one only when its greeting came through
        # (`Transport.open_writes`).
        return Closed.WRITTEN if known.number == 0 or known.is_up.is_set() else Closed.UNWRITTEN

    def greeted(self, writer: str, number: int) -> None:
        """A greeting came on this connection."""
        link = self._links.get(writer)
        if link is not None and link.number == number:
            link.is_up.set()

    async def wait_up(self, writer: str, number: int, timeout_s: float) -> bool:
        """Wait until a greeting has come on this connection; `False`: none came in time, or another one counts."""
        link = self._links.get(writer)
        if link is None or link.number != number:
            return False
        try:
            async with asyncio.timeout(timeout_s):
                await link.is_up.wait()
        except TimeoutError:
            return False
        return True

    def forget(self, writer: str) -> None:
        """Its process has ended."""
        self._links.pop(writer, None)
