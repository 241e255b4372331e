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
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path

_log = logging.getLogger(__name__)

#: After an error, until the lock is tried again.
_AGAIN_S = 5.0


class Lease:
    """Wants the lock from `start` to `close`. Its methods run on one event loop."""

    def __init__(self, path: Path, on_held: Callable[[], None]) -> None:
        """`on_held` is called on the loop when the lock is held."""
        self._path, self._on_held = path, on_held
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._file: int | None = None  # the locked one. Guarded by `_lock`; none is kept once `_closed` is set

    def start(self) -> None:
        self._stand_in_line(after_s=0.0)

    def give_on(self) -> None:
        """Its holder cannot go on: another router may have it, or this one again after a while."""
        self._unlock()
        self._stand_in_line(after_s=_AGAIN_S)

    def close(self) -> None:
        """Give the lock on, now or as soon as it would be had."""
        self._closed.set()
        self._unlock()

    def _unlock(self) -> None:
        with self._lock:
            if self._file is not None:
                os.close(self._file)
                self._file = None

    def _stand_in_line(self, after_s: float) -> None:
        loop = asyncio.get_running_loop()
        # A daemon: one that still waits does not keep the process.
        threading.Thread(target=self._wait, args=(loop, after_s), name="batch lease", daemon=True).start()

    def _wait(self, loop: asyncio.AbstractEventLoop, after_s: float) -> None:
        told: int | None = None  # the log has this error
        while not self._closed.wait(after_s):
            try:
                file = self._locked()
            except OSError as error:
                if error.errno != told:
                    told = error.errno
                    _log.exception("%s cannot be locked; the router tries again every %g s", self._path, _AGAIN_S)
                after_s = _AGAIN_S
                continue
            with self._lock:
                if self._closed.is_set():
                    os.close(file)
                    return
                self._file = file
            loop.call_soon_threadsafe(self._held)
            return

    def _locked(self) -> int:
        """The file, once it is locked. Raises `OSError`."""
        file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:
            os.close(file)
            raise
        return file

    def _held(self) -> None:
        if not self._closed.is_set():  # meanwhile
            self._on_held()


class Wake:
    """Tells the leader, whichever process it is on this host, that the queue has changed: a byte in a named pipe."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._reader: int | None = None

    def listen(self, on_byte: Callable[[], None]) -> None:
        """The leader's: `on_byte` is called on the running loop. Raises `OSError`: there can be no pipe."""
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
        """Where there is no leader now, the next one looks anyway, and one that is not told looks now and then."""
        try:
            writer = os.open(self._path, os.O_WRONLY | os.O_NONBLOCK)
        except OSError as error:
            if error.errno not in (errno.ENXIO, errno.ENOENT):
                _log.warning("who leads the queue of batches is not told of it: %s", error)
            return
        try:
            os.write(writer, b"!")
        except BlockingIOError:  # it is full: the leader has been told often enough
            pass
        finally:
            os.close(writer)
