"""The receiving process: does what the sending one asks for, one measurement after the other."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing import AuthenticationError
from multiprocessing.connection import Listener
from typing import Any

from benchmarks.link.control import Controls, accept, receive_stream
from benchmarks.link.ends import Described, ReceivingEnd
from tandem.engine.layout import KVLayout

_log = logging.getLogger(__name__)


class Receiver:
    """Serves one sender. Methods without an underscore are what it may call."""

    def __init__(self, controls: Controls, host: str, transport: str) -> None:
        self._controls = controls
        self._host = host
        self._transport = transport
        self._end: ReceivingEnd
        self._open = ExitStack()

    def serve(self) -> None:
        """Until the sender goes."""
        self._controls.listen(lambda said: self._end.ask(lambda _: self._end.hear(said)))
        with self._open:
            while True:
                try:
                    name, arguments = self._controls.calls.recv()
                except EOFError:
                    return
                error, result = _try(getattr(self, name), arguments)
                self._controls.calls.send((error, result))

    def open(self, layout: KVLayout, num_pages: int, sender: Described) -> Described:
        """An arena of this shape, in place of the last one."""
        self._open.close()
        made = ReceivingEnd(layout, num_pages, self._transport, self._host, answer=self._controls.tell)
        self._end = self._open.enter_context(made)
        self._end.pair(sender)
        return self._end.described

    def stream(self, num_bytes: int) -> int:
        """Take a TCP stream, at the port that is returned."""
        server = socket.create_server((self._host, 0), family=_family(self._host))
        port: int = server.getsockname()[1]

        def receive() -> None:
            with server:
                receive_stream(server, num_bytes)

        threading.Thread(target=receive, name="link-stream", daemon=True).start()
        return port

    def call(self, name: str, *arguments: Any) -> Any:
        """A method of the end."""
        return getattr(self._end, name)(*arguments)


def listen(host: str, port: int, secret: bytes, transport: str, tell: Callable[[str], None]) -> None:
    """Serve senders at `host`, one after the other, for ever."""
    with Listener((host, port), family="AF_INET6" if ":" in host else "AF_INET", authkey=secret) as listener:
        tell(f"listening on {host} port {port}; Ctrl-C ends it")
        while True:
            try:
                controls = accept(listener)
            except (AuthenticationError, EOFError, OSError) as error:
                tell(f"somebody was turned away: {error or 'the connection broke'}")
                continue
            tell(f"{listener.last_accepted} measures")
            try:
                Receiver(controls, host, transport).serve()
            finally:
                controls.close()


def _try(call: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[str, Any]:
    """What went wrong, or nothing, and the result."""
    try:
        return "", call(*arguments)
    except Exception as error:  # noqa: BLE001 - told to the sender, which reports it
        _log.exception("%s failed", call)
        return f"{type(error).__name__}: {error}", None


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
