"""Slices of threads, as this kernel tells them."""

from __future__ import annotations

import asyncio
import os
import platform
import threading

import pytest

from tandem.core.slices import take_short_slices, take_usual_slices
from tandem.worker.loop_thread import LoopThread
from tests.support.slices import SHORT_NS, in_a_thread, needs_slices, slice_ns

#: Anybody may be nicer.
NICE = min(19, os.getpriority(os.PRIO_PROCESS, 0) + 3)


@needs_slices
def test_a_thread_takes_short_slices_and_the_usual_ones_again_and_keeps_its_nice() -> None:
    def told() -> list[int]:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        found = [slice_ns()]
        for take in (take_short_slices, take_usual_slices):
            assert take()
            found.append(slice_ns())
        return [*found, os.getpriority(os.PRIO_PROCESS, threading.get_native_id())]

    usual_ns, short_ns, again_ns, nice = in_a_thread(told)
    assert short_ns == SHORT_NS < usual_ns
    assert (again_ns, nice) == (usual_ns, NICE)
    assert in_a_thread(slice_ns) == usual_ns, "another thread has what it had"


@needs_slices
def test_the_loop_of_a_worker_has_short_ones() -> None:
    async def told() -> tuple[int, int]:
        return slice_ns(), await asyncio.to_thread(slice_ns)

    thread = LoopThread("loop-test")
    thread.start()
    try:
        assert thread.run(told()).result() == (SHORT_NS, in_a_thread(slice_ns)), "what it gives away computes"
    finally:
        thread.stop()


def test_a_thread_of_a_policy_of_its_own_keeps_it() -> None:
    def told() -> tuple[bool, int]:
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        return take_short_slices(), os.sched_getscheduler(0)

    assert in_a_thread(told) == (False, os.SCHED_BATCH)


def test_a_processor_whose_call_is_not_known_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    assert not in_a_thread(take_short_slices)


def test_where_a_sandbox_forbids_it_threads_go_on_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(pid: int) -> int:
        raise PermissionError

    monkeypatch.setattr(os, "sched_getscheduler", forbidden)
    assert not in_a_thread(take_short_slices)
