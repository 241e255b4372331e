"""uvicorn without its ticking, with bounds, on a socket of our own."""

from __future__ import annotations

import asyncio
import functools
import logging
import resource
import socket

import uvicorn
from starlette.types import ASGIApp

from router.http.protocol import MAX_HEAD_BYTES, BoundedProtocol
from tandem.core.addresses import bare_host, join_address
from tandem.core.config import LimitsConfig
from tandem.core.errors import ConfigError

_log = logging.getLogger(__name__)

_BACKLOG = 1024
#: Descriptors that a router needs beside its connections: workers, logs, the model's files.
_OTHER_DESCRIPTORS = 256
#: In a router that leaves, a connection is closed once nothing has come on it for so long. Most clients use none again
#: that has been idle for longer, so hardly a request meets the close.
_LEAVING_IDLE_S = 10.0
#: A client that reads nothing at all, or whose host is gone, is cut off by the kernel after this.
_DEAD_CLIENT_MS = 60_000
_SEND_BUFFER_BYTES = 128 << 10
_CLOSE = (b"connection", b"close")


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises `ConfigError` where the address cannot be had."""
    host = bare_host(host)
    try:
        family = socket.getaddrinfo(host or "0.0.0.0", port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {join_address(host, port)}: {error.strerror}; choose another port", key="http.port"
        ) from error
    # Accepted connections inherit these.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # Bounded: else the kernel keeps megabytes for a client that does not read, and we do not notice it.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _DEAD_CLIENT_MS)
    return listener


def _allow_descriptors(wanted: int) -> None:
    """Raise this process's soft limit of open files as far as the hard one permits."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed < wanted:
        _log.warning("%d open files are allowed, and limits.max_connections needs %d", allowed, wanted)


class HttpServer(uvicorn.Server):
    """Serves until `stop`. Sleeps while nothing happens: uvicorn's ten ticks a second only renew a date header."""

    def __init__(
        self, app: ASGIApp, limits: LimitsConfig, *, keep_alive_s: float = 75.0, stalled_s: float = 60.0
    ) -> None:
        """`keep_alive_s`: of an idle connection. `stalled_s`: of one whose client reads nothing of its answer."""
        _allow_descriptors(limits.max_connections + _OTHER_DESCRIPTORS)
        protocol = functools.partial(BoundedProtocol, limits=limits, stalled_s=stalled_s, on_lost=self._note_lost)
        super().__init__(
            uvicorn.Config(
                app,
                http=protocol,  # type: ignore[arg-type]  # called, as a class is
                h11_max_incomplete_event_size=MAX_HEAD_BYTES,
                ws="none",
                loop="none",
                lifespan="off",
                interface="asgi3",
                log_config=None,
                access_log=False,
                date_header=False,
                server_header=False,
                timeout_keep_alive=keep_alive_s,  # type: ignore[arg-type]  # a timer's delay
                timeout_graceful_shutdown=2,
            )
        )
        self._stop_asked = asyncio.Event()
        self._may_accept = asyncio.Event()
        self._listens = asyncio.Event()
        self._none_open = asyncio.Event()  # no connection, as of the last end of one

    async def serve_on(self, listener: socket.socket) -> None:
        """Serve from `begin` to `stop`."""
        await self._may_accept.wait()
        if not self.should_exit:
            await self.serve(sockets=[listener])

    def begin(self) -> None:
        """Take connections from now on."""
        self._may_accept.set()

    def stop(self) -> None:
        """End `serve_on`: no new connections, a moment for answers under way."""
        self.should_exit = True
        self._may_accept.set()
        self._stop_asked.set()

    async def leave(self) -> None:
        """Take no new connections; return when those that are open have ended.

        Requests that come on them are served, as their clients cannot know: each answer that begins from now on tells
        its client to open another connection for the next one.
        """
        await self._listens.wait()
        if _CLOSE not in self.server_state.default_headers:
            for server in self.servers:
                server.close()
            self.server_state.default_headers.append(_CLOSE)  # the list that every exchange under way has
            for connection in list(self.server_state.connections):
                assert isinstance(connection, BoundedProtocol)
                connection.close_when_idle(_LEAVING_IDLE_S)
        await asyncio.sleep(0)  # a connection that was accepted before is among those that are open after this
        self._note_lost()
        await self._none_open.wait()

    def _note_lost(self) -> None:
        if self.server_state.connections:
            self._none_open.clear()
        else:
            self._none_open.set()

    async def main_loop(self) -> None:
        self._listens.set()
        await self._stop_asked.wait()
