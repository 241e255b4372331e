"""Processes that are stopped, as a debugger or a host out of memory stops them."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from tests.support.waiting import wait_until


def stop_still(pid: int) -> None:
    """Stop it. On return each of its threads stands still: a signal that is sent has not come to all of them yet, and
    one that still runs may accept a connection, or answer."""
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: is_still(pid), f"the stop of process {pid}", 20)


def is_still(pid: int) -> bool:
    """Whether all of its threads are stopped."""
    tasks = Path(f"/proc/{pid}/task").glob("*/stat")
    return {task.read_text().rpartition(")")[2].split()[0] for task in tasks} == {"T"}
