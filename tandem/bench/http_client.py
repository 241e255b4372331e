"""An HTTP/1.1 client for load: as little work for each request as Python allows, on a bounded number of sockets.

It knows what a router answers and nothing else: a head, then a body of known length or in chunks, and of a stream of
server-sent events when the first and the last came. General clients cost ten times as much, and the generator shares
its cores with what it measures.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast
from urllib.parse import urlsplit

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_RETRY_AFTER = re.compile(rb"\r\nretry-after: *(\d+)", re.IGNORECASE)
_CLOSES = re.compile(rb"\r\nconnection: *close", re.IGNORECASE)
_CHUNKED = re.compile(rb"\r\ntransfer-encoding: *chunked", re.IGNORECASE)
_LAST_CHUNK = b"0\r\n\r\n"
_FIRST_EVENT = b"data: {"
_DONE = b"data: [DONE]"
_ERROR_EVENT = b'data: {"error"'

_CONNECT_S = 10.0

#: Statuses of our own for what HTTP has none.
NO_SOCKET, BROKEN, UNFINISHED = -1, -2, -3


@dataclass(slots=True)
class Outcome:
    """What became of one request. Times are of `time.monotonic`, in seconds."""

    sent_s: float
    status: int = 0  # of HTTP, or one of `NO_SOCKET`, `BROKEN`, `UNFINISHED` (a stream without its end)
    first_s: float | None = None  # the first event of a stream
    ended_s: float = 0.0
    retry_after_s: int | None = None
    body: bytes = b""

    @property
    def ttft_s(self) -> float:
        return (self.first_s if self.first_s is not None else self.ended_s) - self.sent_s

    @property
    def e2e_s(self) -> float:
        return self.ended_s - self.sent_s


class LoadClient:
    """Sends requests to one origin. `send` never waits: what finds no free socket below the bound is not sent."""

    def __init__(self, url: str, *, max_sockets: int, api_key: str = "") -> None:
        parts = urlsplit(url)
        self.host, self.port = parts.hostname or "127.0.0.1", parts.port or 80
        # How many sockets are open or being opened, and those that are open.
        self._num_sockets = 0
        self._open: set[_Connection] = set()
        self._max_sockets = max_sockets
        self._key = f"Authorization: Bearer {api_key}\r\n" if api_key else ""
        self._idle: list[_Connection] = []
        self._connecting: set[asyncio.Task[None]] = set()
        self._num_under_way = 0
        self._none_under_way = asyncio.Event()
        self._none_under_way.set()

    def message(self, method: str, path: str, body: bytes = b"") -> bytes:
        """The bytes of a request."""
        head = f"{method} {path} HTTP/1.1\r\nHost: {self.host}:{self.port}\r\n{self._key}"
        if body:
            head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        return head.encode() + b"\r\n" + body

    def send(self, message: bytes, on_end: Callable[[Outcome], None]) -> None:
        """Send `message` now; `on_end` gets its outcome, exactly once."""
        outcome = Outcome(time.monotonic())
        self._num_under_way += 1
        self._none_under_way.clear()

        def ended(outcome: Outcome) -> None:
            outcome.ended_s = time.monotonic()
            self._num_under_way -= 1
            if self._num_under_way == 0:
                self._none_under_way.set()
            on_end(outcome)

        while self._idle:
            connection = self._idle.pop()
            if connection.is_usable:
                connection.begin(message, outcome, ended)
                return
        if self._num_sockets >= self._max_sockets:
            outcome.status = NO_SOCKET
            ended(outcome)
            return
        self._num_sockets += 1
        task = asyncio.get_running_loop().create_task(self._connect(message, outcome, ended))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    async def ask(self, method: str, path: str, body: bytes = b"") -> Outcome:
        """One request, awaited."""
        answer: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self.send(self.message(method, path, body), answer.set_result)
        return await answer

    async def wait_none_under_way(self, timeout_s: float) -> None:
        """Until every answer is there; what has none after `timeout_s` is broken off and ends `BROKEN`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._none_under_way.wait()
        except TimeoutError:
            self.close()
            await self._none_under_way.wait()

    def close(self) -> None:
        """Close all connections; what is under way ends `BROKEN`."""
        for connection in list(self._open):
            connection.abort()

    async def _connect(self, message: bytes, outcome: Outcome, ended: Callable[[Outcome], None]) -> None:
        try:
            async with asyncio.timeout(_CONNECT_S):
                _, connection = await asyncio.get_running_loop().create_connection(
                    lambda: _Connection(self), self.host, self.port
                )
        except OSError:  # `TimeoutError` among them
            self._num_sockets -= 1
            outcome.status = BROKEN
            ended(outcome)
        else:
            self._open.add(connection)
            connection.begin(message, outcome, ended)

    def take_back(self, connection: _Connection) -> None:
        """The connection has nothing under way and may serve again."""
        self._idle.append(connection)

    def closed(self, connection: _Connection) -> None:
        """The connection is gone."""
        self._num_sockets -= 1
        self._open.discard(connection)


class _Connection(asyncio.Protocol):
    """One keep-alive connection, with at most one request under way."""

    def __init__(self, client: LoadClient) -> None:
        self._client = client
        self._transport: asyncio.Transport
        self._outcome: Outcome | None = None
        self._on_end: Callable[[Outcome], None]
        self.is_usable = False

    # -- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's do not derive from it
        self.is_usable = True

    def connection_lost(self, _: Exception | None) -> None:
        self.is_usable = False
        self._client.closed(self)
        if self._outcome is not None:
            self._end(BROKEN)

    def data_received(self, data: bytes) -> None:
        outcome = self._outcome
        if outcome is None:  # an answer that nobody asked for: a 408 of an idle connection, say
            self.close()
            return
        self._received += data
        if not self._has_head and not self._read_head(outcome):
            return
        if self._is_chunked:
            self._read_chunks(outcome)
        elif len(self._received) >= self._length:
            outcome.body = bytes(self._received[: self._length])
            self._end(self._status)

    # -- one request

    def begin(self, message: bytes, outcome: Outcome, on_end: Callable[[Outcome], None]) -> None:
        self._outcome, self._on_end = outcome, on_end
        self._received = bytearray()
        self._has_head = self._is_chunked = self._closes = False
        self._length = self._status = 0
        if self.is_usable:
            self._transport.write(message)
        else:  # lost between its opening and this
            self._end(BROKEN)

    def close(self) -> None:
        self.is_usable = False
        self._transport.close()

    def abort(self) -> None:
        self.is_usable = False
        self._transport.abort()

    def _read_head(self, outcome: Outcome) -> bool:
        end = self._received.find(b"\r\n\r\n")
        if end < 0:
            return False
        head = bytes(self._received[:end])
        del self._received[: end + 4]
        self._has_head = True
        self._status = int(head[9:12])
        self._closes = _CLOSES.search(head) is not None
        self._is_chunked = _CHUNKED.search(head) is not None
        if length := _LENGTH.search(head):
            self._length = int(length[1])
        if after := _RETRY_AFTER.search(head):
            outcome.retry_after_s = int(after[1])
        return True

    def _read_chunks(self, outcome: Outcome) -> None:
        if outcome.first_s is None and _FIRST_EVENT in self._received:
            outcome.first_s = time.monotonic()
        if self._received.endswith(_LAST_CHUNK):
            is_whole = _DONE in self._received and _ERROR_EVENT not in self._received
            outcome.body = bytes(self._received)
            self._end(self._status if is_whole else UNFINISHED)

    def _end(self, status: int) -> None:
        outcome, self._outcome = self._outcome, None
        assert outcome is not None
        outcome.status = status
        if self._closes:
            self.close()
        elif self.is_usable:
            self._client.take_back(self)
        self._on_end(outcome)
