"""Processes of this host: which one it is, the proof that it has ended, and its kill.

A broken connection or a missed heartbeat proves nothing. A pidfd, opened while the process was known to be alive,
becomes readable when that very process has ended, and never speaks of another one with the same pid.
"""

from __future__ import annotations

import asyncio
import logging
import os
import select
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

_log = logging.getLogger(__name__)


def host_id() -> str:
    """Equal for two processes exactly when they see each other's pids: same boot, same pid namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.readlink('/proc/self/ns/pid')}"


@dataclass(frozen=True)
class ProcessId:
    """Names one process of a node for ever.

    Attributes:
        name: place and incarnation, `prefill-0.3f2a90c1d2e4`.
        started: clock ticks since boot; tells it from a later process of the same number.
    """

    name: str
    pid: int
    started: int


def started_at(pid: int) -> int | None:
    """When process `pid` was started, in clock ticks since boot; `None`: there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return int(stat.rpartition(")")[2].split()[19])  # field 22; the name, field 2, may hold anything


def has_ended(process: ProcessId) -> bool:
    """Whether it has provably ended by now; on its own node, from any thread."""
    try:
        fd = os.pidfd_open(process.pid)
    except OSError:  # there is none, or no descriptor is to be had
        return started_at(process.pid) != process.started
    try:
        poller = select.poll()
        poller.register(fd, select.POLLIN)
        is_over = bool(poller.poll(0))  # nobody has reaped it yet, but it runs no more
        return is_over or started_at(process.pid) != process.started
    finally:
        os.close(fd)


def kill_exactly(pid: int, started: int) -> None:
    """SIGKILL to the process of this host that has this number and was started then; without effect on any other."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        if started_at(pid) == started:
            signal.pidfd_send_signal(fd, signal.SIGKILL)
    except ProcessLookupError:
        _log.info("process %d has ended already", pid)
    finally:
        os.close(fd)


class ExitWatch:
    """Watches processes of this host; lives in the event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        # By incarnation. Invariant: holds all and only the open pidfds.
        self._fds: dict[str, int] = {}

    def watch(self, incarnation: str, pid: int, exited: Callable[[], None]) -> None:
        """Call `exited` once when the process ends. It must be alive now, and have just spoken to us.

        Does nothing when this incarnation is watched already.
        """
        if incarnation in self._fds:
            return
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            _log.info("process %d (%s) has ended already", pid, incarnation)
            exited()
            return
        except (OSError, OverflowError) as error:
            # No pidfds here, too many, or no such number can be a pid: its end must be learnt in another way.
            _log.warning("cannot watch process %d (%s): %s", pid, incarnation, error)
            return
        self._fds[incarnation] = fd

        def readable() -> None:
            self._drop(incarnation)
            exited()

        self._loop.add_reader(fd, readable)

    def kill(self, incarnation: str) -> None:
        """SIGKILL to the process that is watched, and to no other that has its number by now; none: no effect."""
        if (fd := self._fds.get(incarnation)) is not None:
            try:
                signal.pidfd_send_signal(fd, signal.SIGKILL)
            except ProcessLookupError:
                _log.info("%s has ended already", incarnation)

    def forget(self, incarnation: str) -> None:
        """Watch it no longer."""
        if incarnation in self._fds:
            self._drop(incarnation)

    def _drop(self, incarnation: str) -> None:
        fd = self._fds.pop(incarnation)
        self._loop.remove_reader(fd)
        os.close(fd)

    def close(self) -> None:
        for incarnation in list(self._fds):
            self._drop(incarnation)
