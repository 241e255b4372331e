"""Breaks the TCP connections between two processes that live, as a firewall, a switch or a reset does."""

from __future__ import annotations

import ctypes
import os
import socket
from typing import Any

import psutil

_PIDFD_GETFD = 438  # the number of the system call, the same on all architectures


def break_connections(one: int, other: int) -> int:
    """Shut down every TCP connection between two processes of this host, by their ids; how many there were."""
    ends = {(c.raddr, c.laddr) for c in psutil.Process(other).net_connections("tcp") if c.raddr}
    mine = [c for c in psutil.Process(one).net_connections("tcp") if c.raddr and (c.laddr, c.raddr) in ends]
    return sum(shut_down(one, connection) for connection in mine)


def shut_down(pid: int, connection: Any) -> bool:
    """Shut one connection of a process, as psutil has seen it; `False`: the process has closed it meanwhile."""
    process = os.pidfd_open(pid)
    try:
        copy = ctypes.CDLL(None, use_errno=True).syscall(_PIDFD_GETFD, process, connection.fd, 0)
    finally:
        os.close(process)
    if copy < 0:
        return False
    try:
        found = socket.socket(fileno=copy)
    except OSError:  # its number is another file's now
        os.close(copy)
        return False
    with found:
        try:
            if found.getpeername()[:2] != tuple(connection.raddr):
                return False
            found.shutdown(socket.SHUT_RDWR)
        except OSError:  # it was shut before, or is another socket's now
            return False
    return True
