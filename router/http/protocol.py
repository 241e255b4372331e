"""uvicorn's HTTP/1.1 protocol with the bounds that it lacks: time, size and number.

    accepted ──first byte──> head ──complete──> body ──complete──> answer ──> idle ──first byte──> head …
       └── header_timeout_s ──┘      └ body_timeout_s ┘    └ reads nothing: stalled_s ┘ └ keep-alive ┘

Each arrow has one timer, so a client that sends a byte now and then gains no time. Where HTTP still allows an answer
the client gets a typed one (408, 431, 400), then the connection is closed; else it is only closed.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import sys
import time
from collections.abc import Callable
from typing import Any

import h11
import orjson
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol
from uvicorn.server import ServerState

from router.http.error_shapes import error_body_at
from router.openai.responses import error_headers
from tandem.core.config import LimitsConfig
from tandem.core.errors import InvalidRequestError, OverloadedError, RequestTimeoutError, TandemError
from tandem.core.socket_wait import came_s

_log = logging.getLogger(__name__)

#: A client could make uvicorn log any number of warnings. What we need to know is logged here.
_UVICORN = logging.getLogger("uvicorn.error.protocol")
_UVICORN.setLevel(logging.ERROR)

_LAST_LOOK_S = 0.01
_LOOP_TICK_S = 0.001
# Whoever reads less than this of an answer in `stalled_s` reads nothing, as far as others care.
_LEAST_READ_BYTES = 16 << 10
MAX_HEAD_BYTES = 16 << 10

#: In `scope["state"]`: when the head of the request had come to this host, on the monotonic clock.
ARRIVED = "arrived_s"
#: In `scope["state"]`: a function that cuts the connection off at once, with what waits to be written.
ABORT = "abort_connection"
#: In `scope["state"]`: a function that sends the next part of a body which has begun, and says whether it could do so
#: at once.
WRITE_PART = "write_part"


class BoundedProtocol(H11Protocol):
    """One connection. h11 says what the client still owes, and the timers follow that.

    Args:
        stalled_s: how long a client may read nothing of its answer.
        on_lost: called when the connection has ended.
    """

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        limits: LimitsConfig,
        stalled_s: float,
        on_lost: Callable[[], object],
    ) -> None:
        super().__init__(config, server_state, {**app_state, ABORT: self._abort, WRITE_PART: self._write_part}, _loop)
        self.logger = _UVICORN
        self._limits = limits
        self._stalled_s = stalled_s
        self._on_lost = on_lost
        # Runs exactly while the client owes the rest of a head or body.
        self._arrival: asyncio.TimerHandle | None = None
        self._awaits = ""  # what `_arrival` waits for: "head" or "body"
        self._stall: asyncio.TimerHandle | None = None
        self._num_unread = 0  # bytes of the answer, when that timer was set
        self._fd = -1
        self._num_body_bytes = 0
        self._num_when_awaited = 0  # of them, when `_arrival` began to run

    # -- asyncio.Protocol

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._fd = transport.get_extra_info("socket").fileno()
        if len(self.connections) > self._limits.max_connections:
            error = OverloadedError(f"{self._limits.max_connections} connections are open; try again later")
            self._refuse(error, 503)
        else:
            self._follow()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timers()
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        self._on_lost()

    def data_received(self, data: bytes) -> None:
        # What had come before the loop looked waits while it serves what it saw first, and before that while it was
        # busy. Its own time is that of the look, and lacks the rest of the millisecond. With the end of a body the next
        # head may come: each request has a copy of its own.
        look_s = min(time.monotonic(), self.loop.time() + _LOOP_TICK_S)
        self.app_state[ARRIVED] = came_s(self._fd, look_s)
        if self.conn.their_state is h11.SEND_BODY:
            self._num_body_bytes += len(data)
        elif self.conn.their_state is h11.IDLE and self._is_head_too_large(data):
            self._refuse_head()
            return
        super().data_received(data)
        has_answered = self.cycle is not None and self.cycle.response_complete
        if has_answered and self._num_body_bytes > self._limits.max_body_bytes + len(data):
            # Nobody reads the body any more. An application that still reads it refuses it by itself.
            self.transport.abort()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._stall is None:
            self._await_reading()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._end_stall()

    def close_when_idle(self, idle_s: float) -> None:
        """The server leaves: what comes is still served, but once nothing has come for so long it is closed."""
        self.timeout_keep_alive = idle_s  # type: ignore[assignment]  # a timer's delay
        if self.timeout_keep_alive_task is not None:
            self.timeout_keep_alive_task.cancel()
            self.timeout_keep_alive_task = self.loop.call_later(idle_s, self.timeout_keep_alive_handler)

    # -- uvicorn's steps

    def handle_events(self) -> None:
        super().handle_events()
        self._follow()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._follow()

    def send_400_response(self, msg: str) -> None:
        """Refuse what h11 cannot read. Called while its error is handled."""
        cause = sys.exception()
        hint = getattr(cause, "error_status_hint", 400)
        _log.info("HTTP refused with %d: %s", hint, cause or msg)
        if hint == 431:
            self._refuse_head()
        else:
            self._refuse(InvalidRequestError(f"this is not HTTP as it should be: {cause or msg}"), hint)

    # -- ours

    def _is_head_too_large(self, data: bytes) -> bool:
        """h11 bounds only an incomplete head. One that comes in one piece must not be larger either."""
        before, _ = self.conn.trailing_data
        if len(before) + len(data) <= MAX_HEAD_BYTES:
            return False
        return b"\r\n\r\n" not in (before + data)[: MAX_HEAD_BYTES + 4]

    def _refuse_head(self) -> None:
        self._refuse(InvalidRequestError(f"the head of the request is larger than {MAX_HEAD_BYTES} bytes"), 431)

    def _follow(self) -> None:
        """Set the timer that fits what the client owes now."""
        state = self.conn.their_state
        if self.transport.is_closing():
            self._stop_timers()
        elif state is h11.SEND_BODY:
            self._await("body", self._limits.body_timeout_s)
        elif state is h11.IDLE and self.timeout_keep_alive_task is None:
            self._num_body_bytes = 0
            self._await("head", self._limits.header_timeout_s)
        else:
            self._await("", 0)

    def _await(self, what: str, timeout_s: float) -> None:
        if what == self._awaits:
            return  # the time counts from when this part began, whatever trickles in
        if self._arrival is not None:
            self._arrival.cancel()
        self._awaits, self._num_when_awaited = what, self._num_body_bytes
        self._arrival = self.loop.call_later(timeout_s, self._late) if what else None

    def _late(self) -> None:
        """The time is over. What lies unread in the socket, because the loop was busy, still counts."""
        self._arrival = self.loop.call_later(_LAST_LOOK_S, self._give_up)

    def _give_up(self) -> None:
        part, self._awaits, self._arrival = self._awaits, "", None
        if part == "body" and self._num_body_bytes - self._num_when_awaited >= self._limits.max_body_bytes:
            # A file, which may be larger: it has as long for each so many bytes.
            self._await("body", self._limits.body_timeout_s)
            return
        key = "body_timeout_s" if part == "body" else "header_timeout_s"
        why = f"the {part} of the request took longer than {getattr(self._limits, key):g} s (limits.{key})"
        _log.info("connection closed: %s", why)
        if part == "body" or self.conn.trailing_data[0]:
            self._refuse(RequestTimeoutError(why), 408)
        else:  # nothing has come
            self.transport.close()

    def _await_reading(self) -> None:
        self._num_unread = self.transport.get_write_buffer_size()
        self._stall = self.loop.call_later(self._stalled_s, self._stalled)

    def _stalled(self) -> None:
        if self._num_unread - self.transport.get_write_buffer_size() >= _LEAST_READ_BYTES:
            self._await_reading()  # a large answer that was written at once
            return
        _log.info("connection dropped: its client read nothing for %g s", self._stalled_s)
        self._abort()

    def _abort(self) -> None:
        self.transport.abort()

    def _write_part(self, make: Callable[[], bytes]) -> bool:
        """As ASGI's `send` does it for an answer without a length, in a fraction of the time: h11 has nothing to
        remember of a chunk. `False`: the client reads too slowly, or is gone, or gets no chunks; then nothing is made
        and nothing sent."""
        cycle = self.cycle
        if cycle is None or not cycle.response_started or cycle.response_complete or cycle.disconnected:
            return False
        if self.flow.write_paused or self.conn.their_http_version != b"1.1":
            return False
        if part := make():
            self.transport.write(b"%x\r\n%b\r\n" % (len(part), part))
        return True

    def timeout_keep_alive_handler(self) -> None:
        """As uvicorn's, also for a client that has not read its last answer."""
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        else:
            super().timeout_keep_alive_handler()

    def _refuse(self, error: TandemError, status: int) -> None:
        """Answer with `error` where nothing was answered yet, and close. The application sees a client that left."""
        self._stop_timers()
        self._unset_keepalive_if_required()
        path, request_id = "", secrets.token_hex(16)
        if self.cycle is not None and not self.cycle.response_complete:
            request_id = self.scope.get("state", {}).get("request_id", request_id)
            path = self.scope["path"]
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = orjson.dumps(error_body_at(path, error, request_id))
            headers = {
                "content-type": "application/json",
                "content-length": str(len(body)),
                "connection": "close",
                "x-request-id": request_id,
                **error_headers(error),
            }
            response = h11.Response(status_code=status, headers=list(headers.items()), reason=STATUS_PHRASES[status])
            for event in (response, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _stop_timers(self) -> None:
        self._await("", 0)
        self._end_stall()

    def _end_stall(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None
