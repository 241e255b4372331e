"""A stuck thread ends the process; a busy one that makes turns, or an idle one, does not."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time

import pytest

from kvtransfer.transfer_thread import TransferThread
from kvtransfer.transports.loopback import LoopbackTransport
from tandem.worker.watchdog import EXIT_CODE, find_stuck, watch_threads
from tests.support.waiting import wait_until

WAIT_S = 60.0


def test_only_a_thread_beyond_its_time_is_reported() -> None:
    now_s = time.monotonic()
    threads = {"idle": lambda: None, "busy": lambda: now_s - 5.0, "stuck": lambda: now_s - 11.0}
    stuck = find_stuck(threads, 10.0)
    assert [name for name, _ in stuck] == ["stuck"]
    assert stuck[0][1] >= 11.0


def test_it_looks_again_and_again() -> None:
    async def scenario() -> str:
        found: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        began_s = time.monotonic()

        def on_stuck(name: str, _: float) -> None:
            if not found.done():
                found.set_result(name)

        task = asyncio.create_task(watch_threads({"runner": lambda: began_s}, 0.1, on_stuck))
        try:
            return await asyncio.wait_for(found, WAIT_S)
        finally:
            task.cancel()

    assert asyncio.run(scenario()) == "runner"


@pytest.mark.long
def test_a_process_that_stood_still_was_not_busy_meanwhile() -> None:
    """Stopped, as the event loop is here, it can neither look nor end a step."""
    turn_s, reports = 0.05, list[str]()

    async def scenario() -> None:
        looked = asyncio.Event()
        since_s = time.monotonic()

        def busy_since() -> float:
            looked.set()
            return since_s

        task = asyncio.create_task(
            watch_threads({"runner": busy_since}, 4 * turn_s, lambda name, _: reports.append(name))
        )
        await asyncio.wait_for(looked.wait(), WAIT_S)
        looked.clear()
        time.sleep(8 * turn_s)  # noqa: ASYNC251 - that is the case
        await asyncio.wait_for(looked.wait(), WAIT_S)
        task.cancel()

    asyncio.run(scenario())
    assert not reports


@pytest.mark.processes
def test_a_stuck_process_ends_with_its_own_code() -> None:
    program = "from tandem.worker.watchdog import end_process; end_process('runner', 12.0)"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert ended.returncode == EXIT_CODE
    assert "runner thread has been busy for 12 s" in ended.stderr


def test_the_transfer_thread_tells_since_when_it_is_busy() -> None:
    entered, leave = threading.Event(), threading.Event()

    def block(_: object) -> None:
        entered.set()
        assert leave.wait(WAIT_S)

    transport = LoopbackTransport("watched")
    thread = TransferThread(transport, lambda _: None, lambda _: None)
    thread.start()
    try:
        before_s = time.monotonic()
        command = thread.submit(block)
        assert entered.wait(WAIT_S)
        since_s = thread.busy_since_s
        assert since_s is not None
        assert before_s <= since_s <= time.monotonic()
        leave.set()
        command.result(WAIT_S)
        wait_until(lambda: thread.busy_since_s is None, "an idle thread")
    finally:
        leave.set()
        thread.stop()
