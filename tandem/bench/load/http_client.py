"""An HTTP/1.1 client for load: as little work for each request as Python allows, on a bounded number of sockets.

It knows what a completion server answers and nothing else: a body, or a stream of server-sent events, of which it
notes when each came. General clients cost ten times as much, and the generator shares its cores with what it measures.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from tandem.bench.load.http_answer import AnswerReader, MalformedAnswerError
from tandem.bench.load.sse import EventParser
from tandem.bench.load.stream_log import StreamLog
from tandem.core.addresses import join_address, split_url
from tandem.core.errors import ConfigError
from tandem.core.socket_wait import came_s

_CONNECT_S = 10.0
_OK = 200

#: Statuses of our own, for what HTTP has no number for.
NO_SOCKET, BROKEN, UNFINISHED, TIMED_OUT, UNREACHABLE = -1, -2, -3, -4, -5


@dataclass(slots=True)
class Outcome:
    """What became of one request. Times are of `time.monotonic`, in seconds."""

    sent_s: float
    status: int = 0  # of HTTP, or one of ours: `UNFINISHED` is a stream without its end, or with an error
    ended_s: float = 0.0
    written_s: float = 0.0  # when its first byte was: a connection may have been opened before
    came_s: float = 0.0  # when its answer's last byte had come to this host: the client may be too busy to read it
    stream: StreamLog | None = None  # where the answer was one
    retry_after_s: int | None = None
    body: bytes = b""  # where the answer was no stream
    why: str = ""  # of our own statuses, where there is more to say
    server: str = ""  # how it names itself
    request_id: str = ""  # by which it remembers the request, by its word

    @property
    def ttft_s(self) -> float:
        events_s = self.stream.event_s if self.stream else []
        return (events_s[0] if events_s else self.ended_s) - self.sent_s

    @property
    def e2e_s(self) -> float:
        return self.ended_s - self.sent_s

    @property
    def own_s(self) -> float:
        """Of a whole answer, what of its time this client took for itself."""
        return self.written_s - self.sent_s + self.ended_s - self.came_s


class LoadClient:
    """Sends requests to one origin. `send` never waits: what finds no free socket below the bound is not sent."""

    def __init__(self, url: str, *, max_sockets: int, api_key: str = "", timeout_s: float | None = None) -> None:
        """`timeout_s` bounds each answer, from the request's first byte to the answer's last.

        Raises:
            ConfigError: `url` is no URL of HTTP.
        """
        try:
            parts = split_url(url)
        except ValueError as error:
            raise ConfigError(
                f"{url!r} is no URL of a server; give one as http://127.0.0.1:8000", key="--url"
            ) from error
        self.tls = ssl.create_default_context() if parts.scheme == "https" else None
        self.host = str(parts.hostname)
        self.port = parts.port or (443 if self.tls else 80)
        # Clients of OpenAI's write `/v1` into the base URL, others leave it out.
        self._base = parts.path.rstrip("/").removesuffix("/v1")
        self.timeout_s = timeout_s
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
        head = f"{method} {self._base}{path} HTTP/1.1\r\nHost: {join_address(self.host, self.port)}\r\n{self._key}"
        if body:
            head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        return head.encode() + b"\r\n" + body

    def send(self, message: bytes, on_end: Callable[[Outcome], object]) -> None:
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

    async def request(self, message: bytes) -> Outcome:
        """`send`, awaited."""
        answer: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()

        def ended(outcome: Outcome) -> None:
            if not answer.done():  # whoever awaited it may have gone
                answer.set_result(outcome)

        self.send(message, ended)
        return await answer

    async def ask(self, method: str, path: str, body: bytes = b"") -> Outcome:
        """One request by its parts, awaited."""
        return await self.request(self.message(method, path, body))

    async def wait_none_under_way(self, timeout_s: float | None) -> None:
        """Until every answer is there; what has none after `timeout_s` (`None`: never) is broken off, `BROKEN`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._none_under_way.wait()
        except TimeoutError:
            self.close()
            await self._none_under_way.wait()

    def close(self) -> None:
        """Close all connections; what is under way ends `BROKEN`."""
        for task in self._connecting:
            task.cancel()
        for connection in list(self._open):
            connection.abort()

    async def _connect(self, message: bytes, outcome: Outcome, ended: Callable[[Outcome], None]) -> None:
        try:
            async with asyncio.timeout(_CONNECT_S):
                _, connection = await asyncio.get_running_loop().create_connection(
                    lambda: _Connection(self), self.host, self.port, ssl=self.tls
                )
        except (Exception, asyncio.CancelledError) as error:  # mostly OSError; UnicodeError of a name like `a..b`
            self._num_sockets -= 1
            is_closed = isinstance(error, asyncio.CancelledError)
            outcome.status = BROKEN if is_closed else UNREACHABLE
            outcome.why = str(error) or type(error).__name__
            ended(outcome)
            if is_closed:
                raise
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


async def get(url: str, path: str, *, timeout_s: float) -> Outcome:
    """One `GET` of `path` at the origin `url`, on a connection of its own."""
    client = LoadClient(url, max_sockets=1, timeout_s=timeout_s)
    try:
        return await client.ask("GET", path)
    finally:
        client.close()


class _Connection(asyncio.Protocol):
    """One keep-alive connection, with at most one request under way."""

    def __init__(self, client: LoadClient) -> None:
        self._client = client
        self._transport: asyncio.Transport
        self._outcome: Outcome | None = None
        self._on_end: Callable[[Outcome], None]
        self._timer: asyncio.TimerHandle | None = None
        self.is_usable = False

    # -- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's do not derive from it
        self._fd = transport.get_extra_info("socket").fileno()
        self.is_usable = True

    def connection_lost(self, error: Exception | None) -> None:
        self.is_usable = False
        self._client.closed(self)
        if self._outcome is not None:
            self._answer.end()
            if self._answer.is_complete:
                self._outcome.came_s = time.monotonic()
                self._end_of_answer(self._outcome)
            else:
                self._end(BROKEN, str(error or "the server closed the connection"))

    def data_received(self, data: bytes) -> None:
        outcome = self._outcome
        if outcome is None:  # an answer that nobody asked for: a 408 of an idle connection, say
            self.close()
            return
        now_s = time.monotonic()
        try:
            content = self._answer.feed(data)
        except MalformedAnswerError as error:
            self._answer.closes = True
            self._end(BROKEN, str(error))
            return
        if self._answer.is_event_stream:
            self._read_events(outcome, content, now_s)
        else:
            self._body += content
        if self._answer.is_complete:
            outcome.came_s = max(outcome.written_s, came_s(self._fd, now_s))
            self._end_of_answer(outcome)

    # -- one request

    def begin(self, message: bytes, outcome: Outcome, on_end: Callable[[Outcome], None]) -> None:
        self._outcome, self._on_end = outcome, on_end
        self._answer, self._events, self._body = AnswerReader(), EventParser(), bytearray()
        if not self.is_usable:  # lost between its opening and this
            self._end(BROKEN, "the server closed the connection")
            return
        if self._client.timeout_s is not None:
            self._timer = asyncio.get_running_loop().call_later(self._client.timeout_s, self._timed_out)
        outcome.written_s = time.monotonic()
        self._transport.write(message)

    def close(self) -> None:
        self.is_usable = False
        self._transport.close()

    def abort(self) -> None:
        self.is_usable = False
        self._transport.abort()

    def _timed_out(self) -> None:
        self.abort()
        self._end(TIMED_OUT, f"no whole answer within {self._client.timeout_s} s")

    def _read_events(self, outcome: Outcome, content: bytes, now_s: float) -> None:
        if outcome.stream is None:
            outcome.stream = StreamLog()
        for data in self._events.feed(content):
            outcome.stream.take(data, now_s)

    def _end_of_answer(self, outcome: Outcome) -> None:
        outcome.body = bytes(self._body)
        stream, status = outcome.stream, self._answer.status
        if status == _OK and stream is not None and not stream.is_whole:
            self._end(UNFINISHED, stream.error or "the stream has no end")
        else:
            self._end(status)

    def _end(self, status: int, why: str = "") -> None:
        outcome, self._outcome = self._outcome, None
        assert outcome is not None
        outcome.status, outcome.why = status, why
        outcome.retry_after_s, outcome.server = self._answer.retry_after_s, self._answer.server
        outcome.request_id = self._answer.request_id
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._answer.closes:
            self.close()
        elif self.is_usable:
            self._client.take_back(self)
        self._on_end(outcome)
