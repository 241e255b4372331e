"""The routers of one host that share a port: one listening socket, which a router that starts gets from one that runs.

Each has a copy of the same socket, so all accept from one queue of the kernel. A router that is stopped or stuck
strands only the connections that it had accepted, and one that leaves closes its copy and loses none that waits. (By
`SO_REUSEPORT` each would have a queue of its own, and what waits there would be lost with it.)

No other process holds the socket: it lives as long as one of the routers, and where none is left the next one binds the
port anew. They meet in a directory that only their user may enter. Each answers there at a Unix socket of its own, in a
thread of its own: a busy event loop keeps nobody from starting. Whoever starts asks the others, or binds the port where
none has it, under the directory's lock: so no two bind it.
"""

from __future__ import annotations

import fcntl
import logging
import os
import socket
import stat
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tandem.core.errors import ConfigError

_log = logging.getLogger(__name__)

_ANSWER_S = 1.0
"""A router that takes longer to answer another is stopped, or as good as that."""
_PATIENCE_S = 10.0
"""So long a router that cannot bind the port asks those again that may have it: on a host that is just starting
everything, or where one compiles, a router is still for some seconds."""

_LOCK = "lock"
_WANTS_SOCKET = b"s"


class Siblings:
    """This router among those that share its port.

    Args:
        directory: where they meet; made if it is missing. No other cluster's routers use it.
        name: of this router, such as `router-0`.

    Raises:
        ConfigError: others may enter the directory.
    """

    def __init__(self, directory: Path, name: str) -> None:
        directory.mkdir(mode=0o700, exist_ok=True)
        self._entry = f"{name}.{os.getpid()}"  # an earlier life of this router may still lie there
        self._directory = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        found = os.fstat(self._directory)
        if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
            raise ConfigError(f"others may enter {directory}, where routers hand each other their socket; remove it")
        self._door = socket.socket(socket.AF_UNIX)
        self._answering: threading.Thread | None = None  # while the door is open
        self._closes = False
        self._handing = threading.Lock()
        self._listener: socket.socket | None = None  # guarded by `_handing`; a copy, while it is to be had here

    # -- the listening socket

    def take_listener(self, bind: Callable[[], socket.socket]) -> tuple[socket.socket, bool]:
        """A copy of the socket that the others have, else what `bind` makes; and whether others have it. From now on
        it is to be had here too. Blocks.

        Raises:
            ConfigError: of `bind`; names routers that may have the port and did not answer for ten seconds.
        """
        with self._locked():
            listener, is_shared = self._ask_or_bind(bind)
            self._open_door(listener)
        return listener, is_shared

    def leave(self) -> None:
        """Hand the socket to nobody any more."""
        with self._handing:
            if self._listener is not None:
                self._listener.close()
                self._listener = None

    def close(self) -> None:
        if self._closes:
            return
        self._closes = True
        self.leave()
        if self._answering is not None:
            self._remove(self._entry)
            self._door.shutdown(socket.SHUT_RDWR)  # wakes the thread
            self._answering.join()
        self._door.close()
        os.close(self._directory)

    # -- asking

    def _others(self) -> list[str]:
        return sorted(set(os.listdir(self._directory)) - {_LOCK, self._entry})

    def _ask_or_bind(self, bind: Callable[[], socket.socket]) -> tuple[socket.socket, bool]:
        """As `take_listener`; asks again while some are silent and the port cannot be had."""
        until = time.monotonic() + _PATIENCE_S
        while True:
            listener, silent = self._ask_for_listener()
            if listener is not None:
                return listener, True
            try:
                return bind(), False
            except ConfigError as error:
                if not silent:
                    raise
                if time.monotonic() >= until:
                    why = f"{error.message}; {', '.join(silent)} may have it, and did not answer"
                    raise ConfigError(why, key=error.key) from error

    def _ask_for_listener(self) -> tuple[socket.socket | None, list[str]]:
        """The socket, if one of the others hands it over; and who did not answer."""
        silent = []
        for entry in self._others():
            try:
                with self._asked(entry) as answer:
                    _, handed, _, _ = socket.recv_fds(answer, 1, 1)
            except TimeoutError:
                silent.append(_name_of(entry))
            except OSError:  # it has ended, and nobody else looks for it while the lock is held
                self._remove(entry)
            else:
                if handed:
                    _log.info("%s has handed over the listening socket", _name_of(entry))
                    os.set_inheritable(handed[0], False)
                    return socket.socket(fileno=handed[0]), silent
        return None, silent

    @contextmanager
    def _asked(self, entry: str) -> Iterator[socket.socket]:
        """Raises `TimeoutError` where it does not answer, another `OSError` where it has ended."""
        with socket.socket(socket.AF_UNIX) as connection:
            # By the kernel: one with a timeout of Python's own would not wait where too many stand at the door.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _seconds(_ANSWER_S))
            try:
                connection.connect(self._path(entry))
            except BlockingIOError:
                raise TimeoutError(f"too many others wait for {_name_of(entry)}") from None
            connection.settimeout(_ANSWER_S)
            connection.sendall(_WANTS_SOCKET)
            yield connection

    def _remove(self, entry: str) -> None:
        with suppress(FileNotFoundError):
            os.unlink(entry, dir_fd=self._directory)

    def _path(self, entry: str) -> str:
        """Short, wherever the directory lies: the address of a Unix socket has 107 bytes at most."""
        return f"/proc/self/fd/{self._directory}/{entry}"

    @contextmanager
    def _locked(self) -> Iterator[None]:
        lock = os.open(_LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600, dir_fd=self._directory)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)

    # -- answering

    def _open_door(self, listener: socket.socket) -> None:
        self._remove(self._entry)  # of an earlier process with this number
        # Whether an accept waits is said once for all copies, and `dup` says it again by its original: were it to
        # wait, the event loop of a router that serves would stand still in the accept behind the last connection.
        listener.setblocking(False)
        self._listener = listener.dup()
        self._door.bind(self._path(self._entry))
        self._door.listen()
        self._answering = threading.Thread(target=self._answer_all, name="siblings", daemon=True)
        self._answering.start()

    def _answer_all(self) -> None:
        """Until `close`."""
        while True:
            try:
                connection, _ = self._door.accept()
            except OSError:
                if not self._closes:
                    _log.exception("no router that starts gets the listening socket here any more")
                return
            with connection:
                connection.settimeout(_ANSWER_S)
                try:
                    self._answer(connection)
                except OSError as error:  # it has gone, or is too slow
                    _log.info("another router got no answer: %s", error)
                except Exception:  # noqa: BLE001 - logged; without this thread no router that starts gets the socket
                    _log.exception("another router got no answer")

    def _answer(self, connection: socket.socket) -> None:
        asked = connection.recv(1)
        with self._handing:
            if asked == _WANTS_SOCKET and self._listener is not None:
                socket.send_fds(connection, [_WANTS_SOCKET], [self._listener.fileno()])


def _seconds(seconds: float) -> bytes:
    """As the kernel's `struct timeval`."""
    return struct.pack("@ll", int(seconds), round(seconds % 1 * 1e6))


def _name_of(entry: str) -> str:
    return entry.rpartition(".")[0]
