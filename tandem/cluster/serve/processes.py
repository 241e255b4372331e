"""This process's family: how `tandem serve` makes sure that nothing outlives it."""

from __future__ import annotations

import ctypes
import os
import select
import subprocess
import sys
import uuid

import psutil

from tandem.cluster.serve import orphan_guard

_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Make this process the parent of every descendant whose own parent dies.

    Ray's workers are grandchildren; with this, all of them are descendants of this process, whoever died between.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def start_guard() -> None:
    """Mark everything that this process starts from here on, and have it killed if this process is."""
    mark = uuid.uuid4().hex
    line = [sys.executable, "-I", "-S", orphan_guard.__file__, str(os.getpid()), mark]
    subprocess.Popen(line, stdin=subprocess.DEVNULL, start_new_session=True)
    os.environ[orphan_guard.VARIABLE] = mark


def kill_descendants(timeout_s: float = 5.0) -> int:
    """SIGKILL and reap all descendants; how many there were.

    Raises:
        RuntimeError: some could not be killed within `timeout_s` (they hang in the kernel).
    """
    num_killed = 0
    while family := [p for p in psutil.Process().children(recursive=True) if _lives(p)]:
        for process in family:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
            num_killed += 1
        _, alive = psutil.wait_procs(family, timeout=timeout_s)
        if alive:
            raise RuntimeError(f"could not kill {', '.join(f'{p.pid} ({p.name()})' for p in alive)}")
    _reap()
    return num_killed


def wait_for_exit(process: psutil.Process, timeout_s: float) -> bool:
    """Whether `process`, which need not be a child, has ended within `timeout_s`; a zombie has."""
    try:
        fd = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return True
    try:
        if not process.is_running():  # the number belongs to another process by now
            return True
        poller = select.poll()
        poller.register(fd, select.POLLIN)
        return bool(poller.poll(timeout_s * 1000))
    finally:
        os.close(fd)


def _lives(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _reap() -> None:
    """Collect what has ended and was handed to us, so that no zombie is left while this process goes on."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return
