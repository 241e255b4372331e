"""Deadlines that wake, and deaths that are seen."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from tandem.core.pidfd import ExitWatch, host_id
from tandem.worker.ticker import Ticker

WAIT_S = 60.0


class Bell:
    def __init__(self) -> None:
        self.times: list[float] = []
        self._rung = asyncio.Event()

    def __call__(self) -> None:
        self.times.append(time.monotonic())
        self._rung.set()

    async def wait(self) -> None:
        await asyncio.wait_for(self._rung.wait(), WAIT_S)
        self._rung.clear()


async def test_a_ticker_rings_at_its_deadline_and_only_then() -> None:
    ticker = Ticker(asyncio.get_running_loop(), bell := Bell())
    due = time.monotonic() + 0.05
    ticker.set(due)
    ticker.set(due)
    await bell.wait()
    assert len(bell.times) == 1
    assert bell.times[0] >= due - 0.001


async def test_an_earlier_deadline_moves_it_and_none_stops_it() -> None:
    ticker = Ticker(asyncio.get_running_loop(), bell := Bell())
    ticker.set(time.monotonic() + 60)
    ticker.set(time.monotonic())
    await bell.wait()
    stopped = Ticker(asyncio.get_running_loop(), silent := Bell())
    stopped.set(time.monotonic() + 0.01)
    stopped.set(None)
    ticker.set(time.monotonic() + 0.05)
    await bell.wait()
    assert not silent.times


@pytest.mark.long
async def test_a_deadline_that_moves_while_it_rings_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """It rings early for a deadline that has moved away; just then another thread moves that away too, and back."""
    ticker = Ticker(asyncio.get_running_loop(), bell := Bell())
    clock, start_s = time.monotonic, time.monotonic()
    ticker.set(start_s + 0.05)
    await asyncio.sleep(0)
    ticker.set(start_s + 0.2)
    mover = threading.Thread(target=ticker.set, args=(start_s + 60,))
    threads = [mover]
    rings = asyncio.Event()

    def monotonic() -> float:
        if threads:  # called as it rings: the thread has its chance, and 20 ms
            threads[0].start()
            threads.pop().join(0.02)
            rings.set()
        return clock()

    # The ticker's clock alone: the event loop looks at its own all the time.
    monkeypatch.setattr("tandem.worker.ticker.time", SimpleNamespace(monotonic=monotonic))
    await asyncio.wait_for(rings.wait(), WAIT_S)
    monkeypatch.undo()
    await asyncio.to_thread(mover.join)  # and what it has queued comes before the return from here
    ticker.set(start_s + 0.3)
    await bell.wait()
    assert bell.times[0] >= start_s + 0.299


async def test_a_ticker_is_set_from_other_threads() -> None:
    ticker = Ticker(asyncio.get_running_loop(), bell := Bell())
    thread = threading.Thread(target=lambda: ticker.set(time.monotonic() - 1))
    thread.start()
    await bell.wait()
    thread.join()
    ticker.set(time.monotonic())  # after it rang, the same thread of time goes on
    await bell.wait()


async def test_deadlines_that_move_away_wake_nobody_and_the_last_one_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    calls: list[object] = []
    real = loop.call_soon_threadsafe

    def counted(*arguments: Any) -> Any:
        calls.append(arguments)
        return real(*arguments)

    monkeypatch.setattr(loop, "call_soon_threadsafe", counted)
    ticker = Ticker(loop, bell := Bell())
    begun_s = time.monotonic()
    for moved in range(20):
        ticker.set(begun_s + 0.02 + moved / 200)
        await asyncio.sleep(0)
    assert len(calls) == 1
    await bell.wait()
    assert len(bell.times) == 1
    assert bell.times[0] >= begun_s + 0.02 + 19 / 200 - 0.001


def child() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)


@pytest.mark.processes
async def test_the_end_of_a_process_is_seen_once() -> None:
    process, bell = child(), Bell()
    watch = ExitWatch(asyncio.get_running_loop())
    watch.watch("p#1", process.pid, bell)
    watch.watch("p#1", process.pid, bell)
    assert process.poll() is None
    process.kill()
    await bell.wait()
    assert len(bell.times) == 1
    process.wait()
    watch.close()


@pytest.mark.processes
async def test_a_process_that_has_ended_already() -> None:
    process, bell = child(), Bell()
    process.kill()
    process.wait()
    ExitWatch(asyncio.get_running_loop()).watch("p#1", process.pid, bell)
    assert len(bell.times) == 1


@pytest.mark.processes
async def test_closing_forgets_and_leaves_no_descriptor() -> None:
    process, bell = child(), Bell()
    watch = ExitWatch(asyncio.get_running_loop())
    before = len(os.listdir("/proc/self/fd"))
    watch.watch("p#1", process.pid, bell)
    assert len(os.listdir("/proc/self/fd")) == before + 1
    watch.close()
    assert len(os.listdir("/proc/self/fd")) == before
    process.kill()
    process.wait()
    assert not bell.times


async def test_a_host_without_pidfds_is_no_reason_to_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_: int) -> int:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(os, "pidfd_open", missing)
    bell = Bell()
    ExitWatch(asyncio.get_running_loop()).watch("p#1", os.getpid(), bell)
    assert not bell.times


@pytest.mark.processes
def test_a_child_shares_this_host() -> None:
    code = "from tandem.core.pidfd import host_id; print(host_id())"
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root)
    assert told.stdout.strip() == host_id()
