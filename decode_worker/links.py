"""The connections by which prefill workers write here: which one counts, and whether it is up. In the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from kvtransfer.transports.base import Transport
from kvtransfer.transports.events import Greeting, PeerId
from tandem.core.errors import TransportError

AskTransport = Callable[[Callable[[Transport], Any]], Future[Any]]
"""Runs a command on the transfer thread, in order; an error is the caller's. Raises `TransportError` when it stops."""


@dataclass(slots=True)
class _Link:
    number: int
    is_up: asyncio.Event = field(default_factory=asyncio.Event)
    trial: int = 0  # the newest that was heard of
    has_come: asyncio.Event = field(default_factory=asyncio.Event)  # its greeting

    @property
    def may_be_written(self) -> bool:
        """A writer posts on its first connection at once, and on a later one only when its greeting came through
        (`Transport.open_writes`), if the transport greets."""
        return self.number == 0 or self.is_up.is_set()

    def greeting(self, trial: int) -> asyncio.Event:
        """Set when the greeting of this trial has come. One that is older than another is given up: nobody waits."""
        if trial == 0:
            return self.is_up
        if trial > self.trial:
            self.trial, self.has_come = trial, asyncio.Event()
        return self.has_come if trial == self.trial else asyncio.Event()


class WriterLinks:
    """One for each writer that has paired, by its incarnation. The writer numbers its connections; the next one comes
    when it has closed the one before."""

    def __init__(self, ask_transport: AskTransport) -> None:
        self._ask_transport = ask_transport
        self._links: dict[str, _Link] = {}

    async def connect(self, writer: str, number: int, metadata: bytes, closed: Callable[[], object]) -> PeerId:
        """Learn a writer that is about to connect, or is about to connect anew; ours of the one before is closed.

        Args:
            closed: called on the transfer thread if bytes of the connection that was closed may be on their way.

        Raises:
            TransportError: its metadata cannot be used, or this worker stops, or the connection that the writer has
                closed was to an earlier worker at this address. Its number would be taken for one of ours, and later
                ones for repetitions, which close nothing.
        """
        known = self._links.get(writer)
        if known is None and number > 0:
            raise TransportError(f"{writer} has had no connection to this worker: it has closed one to an earlier one")
        old = known if known is not None and known.number < number else None
        if known is None or old is not None:  # else the call is repeated
            self._links[writer] = _Link(number)
        may_be_written = old is not None and old.may_be_written

        def connect(transport: Transport) -> PeerId:
            if old is not None:
                transport.hang_up(PeerId(writer))
                if may_be_written or not transport.greets:
                    closed()
            return transport.connect(metadata)

        # Carried out even if whoever asks goes away meanwhile: this number is counted, and closes nothing again.
        peer: PeerId = await asyncio.shield(asyncio.wrap_future(self._ask_transport(connect)))
        return peer

    def greeted(self, writer: str, greeting: Greeting) -> None:
        """A greeting came on this connection."""
        link = self._links.get(writer)
        if link is not None and link.number == greeting.link:
            link.greeting(greeting.trial).set()

    async def await_greeting(self, writer: str, greeting: Greeting, timeout_s: float) -> bool:
        """Wait until a greeting has come on this connection; `False`: none came in time, or another one counts.

        Raises:
            TransportError: this worker stops.
        """
        link = self._links.get(writer)
        if link is None or link.number != greeting.link:
            return False
        key = f"greeting/{writer}/{greeting.link}/{greeting.trial}"  # of its own: the one before may be awaited still
        self._ask_transport(lambda transport: transport.expect_incoming(key, PeerId(writer)))
        has_come = link.greeting(greeting.trial)
        try:
            async with asyncio.timeout(timeout_s):
                await has_come.wait()
        except TimeoutError:
            return False
        finally:
            self._ask_transport(lambda transport: transport.end_incoming(key))
        return True

    def forget(self, writer: str) -> None:
        """Its process has ended."""
        self._links.pop(writer, None)
