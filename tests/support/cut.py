"""Breaks the TCP connections between two processes that live, as a firewall, a switch or a reset does."""

from __future__ import annotations

import ctypes
import os
import socket
from contextlib import closing

import psutil

_PIDFD_GETFD = 438  # the number of the system call, the same on all architectures


def break_connections(one: int, other: int) -> int:
    """Shut down every TCP connection between two processes of this host, by their ids; how many there were."""
    ends = {(c.raddr, c.laddr) for c in psutil.Process(other).net_connections("tcp") if c.raddr}
    mine = [c for c in psutil.Process(one).net_connections("tcp") if c.raddr and (c.laddr, c.raddr) in ends]
    for connection in mine:
        shut_down(one, connection.fd)
    return len(mine)


def shut_down(pid: int, descriptor: int) -> None:
    """Shut one connection of a process."""
    process = os.pidfd_open(pid)
    try:
        copy = ctypes.CDLL(None, use_errno=True).syscall(_PIDFD_GETFD, process, descriptor, 0)
    finally:
        os.close(process)
    if copy < 0:  # it has closed it meanwhile
        return
    with closing(socket.socket(fileno=copy)) as connection:
        try:
            connection.shutdown(socket.SHUT_RDWR)
        except OSError as error:
            print(f"descriptor {descriptor} of {pid} was shut already: {error}")
