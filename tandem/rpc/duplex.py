"""Streams to which both sides write at any time: messages wait in a queue until they are sent.

On the serving side gRPC takes the messages from a generator, whose end is the stream's (`ServedStream`). On the calling
side a task of its own writes them; it ends with the loop that reads (`writing`).
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Generic, TypeVar

_log = logging.getLogger(__name__)

Incoming = TypeVar("Incoming")
Outgoing = TypeVar("Outgoing")

# A peer that is so many messages behind counts as hung. Its stream ends, and with it what the peer had asked for.
_MAX_PENDING_MESSAGES = 4096


class ServedStream(Generic[Outgoing]):
    """The messages to one peer that has called: a router, or a prefill worker that commits. Lives in the event loop.

    Args:
        number: of the stream among those of its kind.
        cut_off: called when the peer is too far behind; it must not count on the stream to move again.
        join: adds its second message to the first one, and says so, where a peer may read both as one. What has
            come to wait while the peer was behind then takes it one message; `None`: it reads each.
    """

    def __init__(
        self, number: int, cut_off: Callable[[], None], join: Callable[[Outgoing, Outgoing], bool] | None = None
    ) -> None:
        self.number = number
        self._cut_off, self._join = cut_off, join
        self._pending: deque[Outgoing] = deque()
        self._wake = asyncio.Event()
        self.closed = False

    def put(self, message: Outgoing) -> None:
        """Queue a message; a peer too far behind is cut off."""
        if self.closed:
            return
        if len(self._pending) >= _MAX_PENDING_MESSAGES:
            _log.error("stream %d: its peer reads too slowly, closing it", self.number)
            self.drop()
            self._cut_off()
            return
        self._pending.append(message)
        self._wake.set()

    def end(self) -> None:
        """Take nothing more; what is queued still goes out."""
        self.closed = True
        self._wake.set()

    def drop(self) -> None:
        """As `end`, but there is nobody to read what is queued."""
        self._pending.clear()
        self.end()

    async def messages(self) -> AsyncIterator[Outgoing]:
        """What is queued, until it ends."""
        while self._pending or not self.closed:
            while self._pending:
                message = self._pending.popleft()
                while self._join is not None and self._pending and self._join(message, self._pending[0]):
                    self._pending.popleft()
                yield message
            self._wake.clear()
            if not self.closed:
                await self._wake.wait()

    @contextmanager
    def reading(self, incoming: AsyncIterator[Incoming], take: Callable[[Incoming], None]) -> Iterator[None]:
        """While it is open, `take` gets each message that comes in. After the last one, or one that fails, the stream
        is dropped."""

        async def read() -> None:
            try:
                async for message in incoming:
                    if not self.closed:
                        take(message)
            except Exception:  # noqa: BLE001 - logged; the stream ends, and with it all that its peer had started
                _log.exception("stream %d: a message failed", self.number)
            finally:
                self.drop()

        reader = asyncio.create_task(read())
        try:
            yield
        finally:
            reader.cancel()


@asynccontextmanager
async def writing(call: Any, unsent: asyncio.Queue[Outgoing], name: str = "") -> AsyncIterator[None]:
    """While it is open, what is put into `unsent` goes out on `call`; at its end the call ends.

    Args:
        call: of a stub, without an iterator of requests. The stubs' types know no stream that is written to.
        name: of the task that writes.
    """

    async def write() -> None:
        while True:
            await call.write(await unsent.get())

    writer = asyncio.create_task(write(), name=name or None)
    try:
        yield
    finally:
        writer.cancel()
        call.cancel()
        # A write fails only with the stream, and whoever reads reports that.
        await asyncio.gather(writer, return_exceptions=True)
