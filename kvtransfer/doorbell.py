"""Wakes a sleeping transfer thread: its own process rings, or a peer that has just done something for it.

A ring has no content: whoever hears it polls. A peer's ring is an empty datagram, which may get lost or come from
anybody, so the sleeper wakes up from time to time all the same. Thanks to rings it need not poll often for what comes
seldom, and need not sleep on when it comes.
"""

from __future__ import annotations

import ctypes
import logging
import os
import select
import socket
import threading

from tandem.core.errors import TransportError

_log = logging.getLogger(__name__)

# Rings that are taken at once; further ones wake the thread again.
_MAX_RINGS = 64


class _PollFd(ctypes.Structure):
    _fields_ = (("fd", ctypes.c_int), ("events", ctypes.c_short), ("revents", ctypes.c_short))


class _TimeSpec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


# By ctypes: Python's own poll and epoll count in milliseconds, its select takes no descriptor from 1,024 on.
_ppoll = ctypes.CDLL(None).ppoll
_ppoll.argtypes = (ctypes.POINTER(_PollFd), ctypes.c_ulong, ctypes.POINTER(_TimeSpec), ctypes.c_void_p)


class Doorbell:
    """One thread waits, any thread and any peer rings.

    Args:
        host: address or name of this host, of either family, that peers can reach.

    Attributes:
        host, port: where peers ring, by UDP; the host as an address.
        num_from_peers: rings of peers that were heard.

    Raises:
        TransportError: `host` is no address of this host.
    """

    def __init__(self, host: str) -> None:
        try:
            family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)[0]
            self._socket = socket.socket(family, socket.SOCK_DGRAM)
        except OSError as error:
            raise TransportError(f"cannot listen on {host}: {error}") from error
        try:
            self._socket.bind(address)
        except OSError as error:
            self._socket.close()
            raise TransportError(f"cannot listen on {host}: {error}") from error
        self._socket.setblocking(False)
        self.host, self.port = self._socket.getsockname()[:2]
        self._own = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        descriptors = (self._own, self._socket.fileno())
        self._waited = (_PollFd * 2)(*(_PollFd(fd, select.POLLIN, 0) for fd in descriptors))
        self._lock = threading.Lock()  # held for a ring, so that no descriptor is closed under it
        self._is_closed = False
        self.num_from_peers = 0

    def ring(self) -> None:
        """Wake the thread that waits here, or that waits next."""
        with self._lock:
            if not self._is_closed:
                os.eventfd_write(self._own, 1)

    def ring_at(self, host: str, port: int) -> None:
        """Ring at a peer's doorbell; `host` is an address. A ring that is not heard does no harm."""
        try:
            self._socket.sendto(b"", (host, port))
        except OSError as error:  # full buffers, no way there
            _log.debug("no ring at %s:%d: %s", host, port, error)

    def wait(self, timeout_s: float | None) -> bool:
        """Wait until somebody rings, for at most `timeout_s` (`None`: no limit). Return whether somebody has rung."""
        limit = None if timeout_s is None else ctypes.byref(_TimeSpec(int(timeout_s), int(timeout_s % 1 * 1e9)))
        if _ppoll(self._waited, len(self._waited), limit, None) <= 0:  # below 0: a signal came
            return False
        own, peers = self._waited
        if own.revents:
            os.eventfd_read(self._own)
        if peers.revents:
            self._take_rings()
        return True

    def close(self) -> None:
        """Idempotent. Nobody may be waiting."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._socket.close()
                os.close(self._own)

    def __del__(self) -> None:
        """Close as a socket does: nobody closes a transport that could not start."""
        if hasattr(self, "_lock"):
            self.close()

    def _take_rings(self) -> None:
        for _ in range(_MAX_RINGS):
            try:
                self._socket.recv(1)
                self.num_from_peers += 1
            except BlockingIOError:
                return
            except OSError as error:  # of an earlier ring of ours
                _log.debug("a ring was not heard: %s", error)
