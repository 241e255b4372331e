"""Ends of what a run of Ray's nodes leaves: all that it has marked, whoever started it."""

from __future__ import annotations

import os
import subprocess
import uuid

import psutil
import pytest

from benchmarks.autoscale.ray_hosts import MARK, _is_raylet, end_marked, marked
from tests.support.waiting import wait_until

#: It starts others without pause, each in a session of its own.
BREEDING = "while :; do setsid sleep 300 & sleep 0.005; done"


@pytest.mark.processes
@pytest.mark.long
def test_all_that_is_marked_ends_also_what_is_started_meanwhile() -> None:
    mark = uuid.uuid4().hex
    process = subprocess.Popen(["bash", "-c", BREEDING], env={**os.environ, MARK: mark}, stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: len(list(marked(mark))) > 3, "some processes", 30)
    finally:
        end_marked(mark)
        process.wait()
    assert not list(marked(mark))


def test_a_process_that_cannot_be_seen_is_no_raylet() -> None:
    class Unseen(psutil.Process):
        def __init__(self) -> None:
            super().__init__(os.getpid())

        def cmdline(self) -> list[str]:
            raise psutil.AccessDenied(self.pid)

    assert not _is_raylet(Unseen())
