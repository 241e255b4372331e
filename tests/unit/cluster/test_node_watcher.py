"""Proof of ends and kills, on processes that really run."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from tandem.cluster.ray import node_watcher
from tandem.cluster.ray.node_watcher import NodeWatcher
from tandem.cluster.serve.supervisor_watchdog import kill_exactly
from tandem.core.pidfd import ProcessId, has_ended, started_at

pytestmark = pytest.mark.processes

SLEEPER = [sys.executable, "-c", "print('up', flush=True); import time; time.sleep(600)"]


@pytest.fixture
def child() -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(SLEEPER, stdout=subprocess.PIPE, text=True)
    assert process.stdout
    process.stdout.readline()
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def name_of(process: subprocess.Popen[str], name: str = "prefill-0.aaa") -> ProcessId:
    started = started_at(process.pid)
    assert started is not None
    return ProcessId(name, process.pid, started)


async def test_an_end_is_proved_when_it_happens_and_not_before(child: subprocess.Popen[str]) -> None:
    watcher, process = NodeWatcher(), name_of(child)
    waiting = asyncio.create_task(watcher.wait_ended(process, 30))
    assert not await watcher.wait_ended(process, 0.05)
    assert watcher.watched() == {process.name: False}
    child.kill()
    assert await waiting
    assert watcher.watched() == {process.name: True}
    assert await watcher.wait_ended(process, 0)


async def test_a_stopped_process_has_not_ended_and_can_be_killed(child: subprocess.Popen[str]) -> None:
    watcher, process = NodeWatcher(), name_of(child)
    child.send_signal(signal.SIGSTOP)
    assert not await watcher.wait_ended(process, 0.05)
    watcher.kill(process)
    assert await watcher.wait_ended(process, 5)
    assert child.wait() == -signal.SIGKILL


async def test_a_process_that_ended_unwatched_is_proved_by_any_later_watcher(child: subprocess.Popen[str]) -> None:
    process = name_of(child)
    child.kill()
    child.wait()
    assert await NodeWatcher().wait_ended(process, 5)


async def test_a_number_that_belongs_to_another_process_by_now_proves_the_end_and_protects_it(
    child: subprocess.Popen[str],
) -> None:
    """The pid is alive, but it was started at another time: the one that is meant has gone."""
    watcher, now = NodeWatcher(), name_of(child)
    before = ProcessId("prefill-0.old", now.pid, now.started - 1)
    assert await watcher.wait_ended(before, 5)
    watcher.kill(before)
    kill_exactly(before.pid, before.started)
    assert not await watcher.wait_ended(now, 0.1)
    assert child.poll() is None


def test_an_end_can_be_judged_without_waiting(child: subprocess.Popen[str]) -> None:
    process = name_of(child)
    child.send_signal(signal.SIGSTOP)
    assert not has_ended(process)
    assert has_ended(ProcessId("prefill-0.old", process.pid, process.started - 1))
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert started_at(child.pid) == process.started  # a zombie, not reaped
    assert has_ended(process)
    child.wait()
    assert has_ended(process)


async def test_no_descriptor_stays_open(child: subprocess.Popen[str]) -> None:
    watcher, process = NodeWatcher(), name_of(child)
    num_before = psutil.Process().num_fds()
    await watcher.wait_ended(process, 0)
    await watcher.wait_ended(ProcessId("prefill-0.old", process.pid, process.started - 1), 0)
    has_ended(process)
    assert psutil.Process().num_fds() == num_before + 1
    watcher.kill(process)
    assert await watcher.wait_ended(process, 5)
    assert psutil.Process().num_fds() == num_before


async def test_what_is_remembered_is_bounded(child: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_watcher, "MAX_REMEMBERED", 3)
    watcher, alive = NodeWatcher(), name_of(child)
    await watcher.wait_ended(alive, 0)
    for n in range(10):
        await watcher.wait_ended(ProcessId(f"decode-0.{n}", alive.pid, alive.started - 1), 0)
    assert list(watcher.watched()) == [alive.name, "decode-0.7", "decode-0.8", "decode-0.9"]


def test_a_start_is_told_whatever_the_process_is_called(child: subprocess.Popen[str]) -> None:
    assert started_at(child.pid) == started_at(child.pid)
    assert started_at(os.getpid()) != started_at(1)
    named = "import ctypes; ctypes.CDLL(None).prctl(15, b'a ) R (b', 0, 0, 0); print('up', flush=True); input()"
    odd = subprocess.Popen([sys.executable, "-c", named], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert odd.stdout
    odd.stdout.readline()
    ticks = started_at(odd.pid)
    assert ticks is not None
    assert abs(ticks / os.sysconf("SC_CLK_TCK") + psutil.boot_time() - psutil.Process(odd.pid).create_time()) < 2
    odd.kill()
    odd.communicate()
    assert started_at(odd.pid) is None


PARENT = """
import subprocess, sys
from tandem.cluster.serve import processes
processes.start_guard()
children = [subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
            for _ in range(2)]
print(*(c.pid for c in children), flush=True)
sys.stdin.read()
"""


def test_the_guard_kills_what_a_killed_parent_leaves_and_nothing_else(child: subprocess.Popen[str]) -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert parent.stdout
    left = [psutil.Process(int(pid)) for pid in parent.stdout.readline().split()]
    guards = [p for p in psutil.Process(parent.pid).children() if "guard.py" in " ".join(p.cmdline())]
    assert len(left) == 2
    assert len(guards) == 1
    parent.kill()
    parent.communicate()
    _, alive = psutil.wait_procs([*left, *guards], timeout=10)
    assert not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]
    assert child.poll() is None
