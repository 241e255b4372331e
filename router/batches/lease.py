"""Which router works the queue off: the one that holds the lock of a file. The kernel gives it on when its holder ends.

The lock is `flock`'s: of the open file, so that two routers of one process are two; on NFS Linux makes it a lock of the
server. Whoever waits for it sleeps in the kernel. What a holder wrote that lost its lock unseen (a host cut off from
its file server) harms nothing: of two results of one line the first counts.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import threading
from collections.abc import Callable
from pathlib import Path


class Lease:
    """Wants the lock from `start` to `close`. Its methods run on one event loop."""

    def __init__(self, path: Path, on_held: Callable[[], None]) -> None:
        """`on_held` is called on the loop when the lock is held."""
        self._path, self._on_held = path, on_held
        self._lock = threading.Lock()
        # Guarded by `_lock`: the locked file, and whether the lock is wanted no more.
        self._file: int | None = None
        self._is_closed = False

    def start(self) -> None:
        loop = asyncio.get_running_loop()
        # A daemon: one that still waits does not keep the process.
        threading.Thread(target=self._wait, args=(loop,), name="batch lease", daemon=True).start()

    def _wait(self, loop: asyncio.AbstractEventLoop) -> None:
        file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(file, fcntl.LOCK_EX)
        with self._lock:
            if self._is_closed:
                os.close(file)
                return
            self._file = file
        loop.call_soon_threadsafe(self._on_held)

    def close(self) -> None:
        """Give the lock on, now or as soon as it would be had."""
        with self._lock:
            self._is_closed = True
            if self._file is not None:
                os.close(self._file)
                self._file = None


class Wake:
    """Tells the leader, whichever process it is on this host, that the queue has changed: a byte in a named pipe."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._reader: int | None = None

    def listen(self, on_byte: Callable[[], None]) -> None:
        """The leader's: `on_byte` is called on the running loop."""
        with contextlib.suppress(FileExistsError):
            os.mkfifo(self._path, 0o600)
        # For reading and writing: without a writer the pipe would be readable for ever, at its end.
        self._reader = reader = os.open(self._path, os.O_RDWR | os.O_NONBLOCK)

        def read() -> None:
            os.read(reader, 4096)
            on_byte()

        asyncio.get_running_loop().add_reader(reader, read)

    def close(self) -> None:
        if self._reader is not None:
            asyncio.get_running_loop().remove_reader(self._reader)
            os.close(self._reader)
            self._reader = None

    def tell(self) -> None:
        """Where there is no leader now, the next one looks anyway."""
        try:
            writer = os.open(self._path, os.O_WRONLY | os.O_NONBLOCK)
        except OSError as error:
            if error.errno in (errno.ENXIO, errno.ENOENT):
                return
            raise
        try:
            os.write(writer, b"!")
        except BlockingIOError:  # it is full: the leader has been told often enough
            pass
        finally:
            os.close(writer)
