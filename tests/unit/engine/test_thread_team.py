"""Kernels that several threads compute together: each item once, by whoever comes, and nobody waits in vain."""

from __future__ import annotations

import ctypes
import itertools
import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from tandem.engine.cpu import lending, thread_team, threads
from tandem.engine.cpu.atomics import add, pause, read, words
from tandem.engine.cpu.threads import Kernel

_REPOSITORY = Path(__file__).parents[3]

_two_words, _three_words = words(2), words(3)


def _count(first, end, arguments):  # type: ignore[no-untyped-def] # pragma: no cover - compiled
    counts, step = _two_words(arguments)
    for item in range(first, end):
        add(counts + 8 * item, step)


def _meet(first, end, arguments):  # type: ignore[no-untyped-def] # pragma: no cover - compiled
    """Each item waits for all others to be begun: they end only on as many threads."""
    begun, num_items = _two_words(arguments)
    for _ in range(first, end):
        add(begun, 1)
        while read(begun) < num_items:
            pause()


def _double(first, end, arguments):  # type: ignore[no-untyped-def] # pragma: no cover - compiled
    """Adds twice what the call before this must have written, of the items from the other end."""
    source, target, num_items = _three_words(arguments)
    for item in range(first, end):
        add(target + 8 * item, 2 * read(source + 8 * (num_items - 1 - item)))


def _cut(first, end, arguments):  # type: ignore[no-untyped-def] # pragma: no cover - compiled
    """How many pieces the work was cut into."""
    num_pieces, step = _two_words(arguments)
    add(num_pieces, step)


count = Kernel(_count, "ii")
cut = Kernel(_cut, "ii")
meet = Kernel(_meet, "ii")
double = Kernel(_double, "iii")
count_alone = Kernel(_count, "ii", items_to_share=1_000)


@pytest.mark.parametrize("num_threads", [1, 2, 3, 7])
@pytest.mark.parametrize("num_items", [0, 1, 2, 5, 64, 1000])
def test_each_item_is_computed_once(num_threads: int, num_items: int) -> None:
    counts = np.zeros(num_items + 1, dtype=np.int64)
    count(num_threads, num_items, counts.ctypes.data, 1)
    assert counts.tolist() == [1] * num_items + [0]


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_calls_of_a_program_go_one_after_the_other(num_threads: int) -> None:
    """Each reads what the one before it wrote, by whichever thread."""
    num_items, num_calls = 40, 30
    stages = np.zeros((num_calls + 1, num_items), dtype=np.int64)
    places = [row.ctypes.data for row in stages]
    calls = [count.call(num_items, places[0], 1)]
    for source, target in itertools.pairwise(places):
        calls.append(double.call(num_items, source, target, num_items))
        calls.append(count_alone.call(1, target, 0))  # one that nobody shares, in between
    for _ in range(50):
        stages[:] = 0
        threads.run(num_threads, *calls)
        assert np.array_equal(stages, np.repeat(2 ** np.arange(num_calls + 1)[:, None], num_items, axis=1))


@pytest.mark.long
def test_few_items_are_not_shared() -> None:
    alone = Kernel(_meet, "ii", items_to_share=3)
    begun = np.zeros(1, dtype=np.int64)
    alone(2, 3, begun.ctypes.data, 2)  # three are: two threads meet
    assert begun[0] == 3
    begun[:] = 0
    done = threading.Event()

    def wait_in_vain() -> None:
        alone(2, 2, begun.ctypes.data, 2)
        done.set()

    waiting = threading.Thread(target=wait_in_vain, daemon=True)
    waiting.start()
    assert not done.wait(0.2)
    begun[0] = 2  # what the second item would have done
    waiting.join()


@pytest.mark.long
@pytest.mark.parametrize("num_threads", [2, 3])
def test_followers_come_awake_and_asleep(num_threads: int) -> None:
    for _ in range(20):
        for _ in range(3):  # the second and third find them awake
            begun = np.zeros(1, dtype=np.int64)
            meet(num_threads, num_threads, begun.ctypes.data, num_threads)
            assert begun[0] == num_threads
        time.sleep(0.005)  # long enough to fall asleep; how long is what is tried here


@pytest.mark.long
def test_a_late_follower_never_touches_the_next_kernel() -> None:
    """More threads than cores, so that they are late all the time, and arguments that change with each kernel."""
    generator = random.Random(0)
    counts = np.zeros(64, dtype=np.int64)
    expected = np.zeros(64, dtype=np.int64)
    for turn in range(20_000):
        num_items, step = generator.randrange(1, 64), 1 + turn % 7
        count(1 + turn % 6, num_items, counts.ctypes.data, step)
        expected[:num_items] += step
        assert np.array_equal(counts, expected), turn


def test_a_kernel_that_is_over_has_no_seats() -> None:
    """A follower that took one would compute with arguments that are gone; here none ever comes."""
    board = thread_team.Team()._board
    counts = np.zeros(5, dtype=np.int64)
    program = np.frombuffer(count.call(5, counts.ctypes.data, 1), dtype=np.int64)
    assert thread_team._lead(board, program, 4, 4, 0, 0) == program.size
    assert counts.tolist() == [1] * 5
    assert ctypes.c_int64.from_address(board + thread_team._STATE).value & thread_team._SEAT_BITS == 0


def test_two_leaders_at_once_are_both_served() -> None:
    """The second computes alone."""

    def lead(counts: np.ndarray) -> None:
        for _ in range(5_000):
            count(2, 32, counts.ctypes.data, 1)

    both = [np.zeros(32, dtype=np.int64) for _ in range(2)]
    leaders = [threading.Thread(target=lead, args=(counts,)) for counts in both]
    for leader in leaders:
        leader.start()
    for leader in leaders:
        leader.join()
    for counts in both:
        assert counts.tolist() == [5_000] * 32


@pytest.mark.long
def test_followers_sleep_when_nothing_is_to_be_done() -> None:
    begun = np.zeros(1, dtype=np.int64)
    meet(2, 2, begun.ctypes.data, 2)
    time.sleep(0.1)
    before = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before < 0.1


@pytest.mark.processes
@pytest.mark.parametrize("pause_s", [pytest.param(0.0, marks=pytest.mark.faults), 0.2])
def test_a_process_ends_with_followers_awake_or_asleep(pause_s: float) -> None:
    script = "import time, numpy; import test_thread_team as t; n = numpy.zeros(1, dtype=numpy.int64)"
    script += f"; t.meet(3, 3, n.ctypes.data, 3); time.sleep({pause_s}); print(n[0])"
    ended = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", script],
        env=os.environ | {"PYTHONPATH": f"{_REPOSITORY}{os.pathsep}{Path(__file__).parent}"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (ended.returncode, ended.stdout) == (0, "3\n"), ended.stderr


class _Lender:
    """Lends so many threads the first time, the second time and so on; the last number from then on."""

    def __init__(self, *nums_lent: int) -> None:
        self._words = np.zeros(2, dtype=np.int64)
        self.wanted_back_at = self._words.ctypes.data
        self.offered_at = self.wanted_back_at + 8
        self._nums_lent = nums_lent
        self.num_asked = 0

    def borrow(self) -> int:
        self._words[1] = 0
        self.num_asked += 1
        return self._nums_lent[min(self.num_asked, len(self._nums_lent)) - 1]


def test_lent_threads_are_given_back_between_two_kernels() -> None:
    lender = _Lender(1)
    pieces = np.zeros(4, dtype=np.int64)
    first, second, third = (pieces[index:].ctypes.data for index in range(3))
    is_wanted_back = cut.call(1, lender.wanted_back_at, 1)
    program = [cut.call(8, first, 1), cut.call(8, second, 1), is_wanted_back, cut.call(8, third, 1)]
    lending.borrow_from(lender)
    try:
        threads.run(1, *program)
        assert pieces.tolist() == [4, 4, 1, 0]
        threads.run(2, *program)  # wanted back before it begins: two of its own are left
        assert pieces.tolist() == [4 + 4, 4 + 4, 1 + 4, 0]
    finally:
        lending.borrow_from(None)
    threads.run(1, *program)
    assert pieces.tolist() == [9, 9, 6, 0]


@pytest.mark.parametrize("own", [1, 2])
def test_threads_that_are_offered_come_between_two_kernels(own: int) -> None:
    lender = _Lender(0, 1)
    pieces = np.zeros(3, dtype=np.int64)
    first, offers, last = (pieces[index:].ctypes.data for index in range(3))
    is_offered = cut.call(1, lender.offered_at, 1)
    program = [cut.call(12, first, 1), is_offered, cut.call(1, offers, 1), cut.call(12, last, 1), is_offered]
    lending.borrow_from(lender)
    try:
        threads.run(own, *program)
    finally:
        lending.borrow_from(None)
    alone, shared = (1 if own == 1 else 2 * own), 2 * (own + 1)
    assert pieces.tolist() == [alone, 1, shared]
    assert lender.num_asked == 2  # the last offer came when nothing was left to compute


def test_kernels_go_on_without_threads_that_cannot_be_had(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    fresh = thread_team.Team()
    counts = np.zeros(9, dtype=np.int64)
    program = np.frombuffer(count.call(9, counts.ctypes.data, 1), dtype=np.int64)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        for _ in range(2):
            assert fresh.run(program, num_threads=3, num_own=3) == program.size
    assert counts.tolist() == [2] * 9
    assert [record.message for record in caplog.records] == ["kernels have 1 threads only: can't start new thread"]
    fresh._end()


def test_what_is_lent_adds_to_ones_own() -> None:
    lending.borrow_from(_Lender(3))
    try:
        assert lending.threads_now(2) == 5
    finally:
        lending.borrow_from(None)
    assert lending.threads_now(2) == 2
