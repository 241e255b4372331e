"""What the two processes of a measurement say to each other beside the pages: calls and their answers, and news.

Two connections of the standard library, of which one only carries calls. Both begin with a secret that both sides were
given (`multiprocessing.connection` checks it), because what they carry are pickles.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

from tandem.core.errors import TransportError

_BLOCK = 1 << 20


class Controls:
    """Both connections of one measurement."""

    def __init__(self, calls: Connection, news: Connection) -> None:
        self.calls = calls
        self._news = news
        self._lock = threading.Lock()  # several threads tell news

    def ask(self, name: str, *arguments: Any) -> Any:
        """Call `name` on the other side. Raises `TransportError` where it failed there."""
        self.calls.send((name, arguments))
        error, result = self.calls.recv()
        if error:
            raise TransportError(f"the other side: {error}")
        return result

    def tell(self, what: Any) -> None:
        with self._lock:
            self._news.send(what)

    def listen(self, hear: Callable[[Any], object]) -> None:
        """`hear` all news, in a thread of their own, until the connection ends."""

        def run() -> None:
            try:
                while True:
                    hear(self._news.recv())
            except (EOFError, OSError):
                return  # the measurement is over

        threading.Thread(target=run, name="link-news", daemon=True).start()

    def close(self) -> None:
        self.calls.close()
        self._news.close()


def accept(listener: Listener) -> Controls:
    """The other side's two connections, in the order in which `connect` makes them."""
    return Controls(listener.accept(), listener.accept())


def connect(address: tuple[str, int], secret: bytes) -> Controls:
    """Raises `OSError` where nobody listens, `AuthenticationError` where the secret differs."""
    return Controls(Client(address, authkey=secret), Client(address, authkey=secret))


# --- a plain TCP stream -----------------------------------------------------------------------------------------------


def receive_stream(server: socket.socket, num_bytes: int) -> None:
    """Take one connection and read so many bytes from it; then one byte goes back."""
    connection, _ = server.accept()
    with connection:
        memory = memoryview(bytearray(_BLOCK))
        left = num_bytes
        while left:
            got = connection.recv_into(memory[: min(left, _BLOCK)])
            if not got:
                raise TransportError(f"the TCP stream ended {left} bytes early")
            left -= got
        connection.sendall(b"\0")


def send_stream(address: tuple[str, int], num_bytes: int) -> None:
    """Send so many bytes, and wait until they were read."""
    with socket.create_connection(address) as connection:
        memory = memoryview(bytearray(_BLOCK))
        left = num_bytes
        while left:
            left -= connection.send(memory[: min(left, _BLOCK)])
        if not connection.recv(1):
            raise TransportError("the receiver of the TCP stream ended")
