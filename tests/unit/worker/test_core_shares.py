"""Who may compute on whose threads."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import gc
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import psutil
import pytest

from tandem.core.errors import ConfigError
from tandem.worker.cpu import core_shares
from tandem.worker.cpu.core_shares import CoreShares, lent_threads
from tests.support.stopping import stop_still
from tests.support.waiting import wait_until

_REPOSITORY = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("own", "others", "expected"),
    [
        (1, [], 0),
        (1, [(1, True)], 0),
        (1, [(1, False)], 1),
        (1, [(1, True), (1, False)], 0),  # two want one thread: half a thread is none
        (1, [(1, True), (2, False)], 1),
        (4, [(12, False)], 12),
        (4, [(4, True), (8, False)], 4),
        (2, [(6, True), (8, False)], 2),  # in proportion to their own
        (6, [(2, True), (8, False)], 6),
    ],
)
def test_idle_threads_go_to_the_busy_in_proportion(own: int, others: list[tuple[int, bool]], expected: int) -> None:
    assert lent_threads(own, others) == expected


@pytest.fixture(autouse=True)
def many_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "shares"


def test_who_rests_lends_and_who_computes_has_its_own(path: Path) -> None:
    with _joined(path, 1) as first, _joined(path, 2) as second:
        assert first.borrow() == 2
        assert second.borrow() == 0  # the first has just said that it is busy
        assert first.borrow() == 0
        second.rest()
        assert first.borrow() == 2
        first.rest()
        assert second.borrow() == 1


def _is_wanted(shares: CoreShares) -> bool:
    return bool(ctypes.c_int64.from_address(shares.wanted_back_at).value)


def test_who_begins_to_compute_wants_its_threads_back(path: Path) -> None:
    with _joined(path, 1) as first, _joined(path, 1) as second:
        assert first.borrow() == 1
        assert not _is_wanted(first)
        second.borrow()
        assert _is_wanted(first)
        assert first.borrow() == 0
        second.borrow()  # goes on: nothing is lent, so nothing is wanted
        assert not _is_wanted(first)
        second.rest()
        assert first.borrow() == 1
        second.borrow()
        assert _is_wanted(first)


def _is_offered(shares: CoreShares) -> bool:
    return bool(ctypes.c_int64.from_address(shares.offered_at).value)


def test_who_comes_to_rest_offers_its_threads(path: Path) -> None:
    with _joined(path, 1) as first, _joined(path, 1) as second:
        second.borrow()
        assert first.borrow() == 0
        assert not _is_offered(first)
        second.rest()
        assert _is_offered(first)
        assert first.borrow() == 1
        assert not _is_offered(first)
        second.rest()  # it rests still: there is nothing new to have
        assert not _is_offered(first)


def test_who_gains_nothing_is_offered_nothing(path: Path) -> None:
    """One thread cannot be shared by two: neither gets it, nor is offered it."""
    with _joined(path, 1) as prefill, _joined(path, 1) as first, _joined(path, 1) as second:
        prefill.borrow()
        first.borrow()
        second.borrow()
        prefill.rest()
        assert not _is_offered(first)
        assert first.borrow() == 0
        second.rest()
        assert _is_offered(first)
        assert first.borrow() == 2


def test_who_leaves_lends_no_more(path: Path) -> None:
    with _joined(path, 1) as first:
        with _joined(path, 2):
            assert first.borrow() == 2
        assert first.borrow() == 0


def test_nothing_is_offered_to_who_left_in_the_middle_of_a_step(path: Path) -> None:
    with _joined(path, 1) as first:
        with _joined(path, 1) as second:
            second.borrow()
        first.borrow()
        first.rest()
        assert first.borrow() == 0


def test_a_slot_is_used_again(path: Path) -> None:
    with _joined(path, 1) as first:
        for own in (2, 3, 4):
            with _joined(path, own):
                assert first.borrow() == own


def test_nobody_gets_more_threads_than_there_are_cores(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})
    with _joined(path, 2) as first, _joined(path, 4):
        assert first.borrow() == 1


@pytest.mark.processes
def test_a_stopped_worker_counts_as_idle_after_a_while(path: Path) -> None:
    with _joined(path, 1) as first, _other_process(path) as other:
        assert first.borrow() == 0
        stop_still(other.pid)  # it says that it is busy for 0.3 s at a time
        wait_until(first.borrow, "its threads")
        os.kill(other.pid, signal.SIGCONT)
        wait_until(lambda: _is_wanted(first), "its wish to have them back")
        assert first.borrow() == 0


def test_a_long_silence_is_no_rest(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_shares, "_BUSY_NS", 1)
    with _joined(path, 1) as first, _joined(path, 1) as second:
        second.borrow()
        assert first.borrow() == 1  # as if the second were idle
        second.borrow()  # and it is not
        assert _is_wanted(first)


@pytest.mark.processes
def test_the_next_worker_gets_the_slot_of_a_dead_one(path: Path) -> None:
    """Else a worker that comes back would be two for the others."""
    with _joined(path, 1) as first:
        with _other_process(path) as other:
            other.kill()
            other.wait()
        with _joined(path, 2):
            assert first.borrow() == 2


def test_a_file_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere/shares.*No such file.*share_cores") as caught:
        CoreShares(tmp_path / "nowhere" / "shares", 1)
    assert caught.value.key == "scheduling.share_cores"


def test_a_file_that_cannot_be_locked_is_no_lack_of_slots(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    with pytest.raises(ConfigError, match=r"No locks available.*share_cores"):
        CoreShares(path, 1)
    gc.collect()
    assert str(path) not in [file.path for file in psutil.Process().open_files()]


@pytest.mark.processes
def test_workers_that_join_at_once_all_count(path: Path) -> None:
    script = "import sys; from pathlib import Path; from tandem.worker.cpu.core_shares import CoreShares; "
    script += "shares = CoreShares(Path(sys.argv[1]), 1); print(flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", script, str(path)]
    environment = os.environ | {"PYTHONPATH": str(_REPOSITORY)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    processes = [subprocess.Popen(command, env=environment, **pipes) for _ in range(6)]  # type: ignore[call-overload]
    try:
        for process in processes:
            process.stdout.readline()
        with _joined(path, 6) as own:
            assert own.borrow() == 6
    finally:
        for process in processes:
            process.communicate()


@pytest.mark.long
def test_more_workers_than_slots_are_refused(path: Path) -> None:
    joined = [CoreShares(path, 1) for _ in range(255)]
    try:
        with pytest.raises(ConfigError, match="255 workers"):
            CoreShares(path, 1)
    finally:
        for shares in joined:
            shares.leave()


@contextmanager
def _joined(path: Path, num_threads: int) -> Iterator[CoreShares]:
    shares = CoreShares(path, num_threads)
    try:
        yield shares
    finally:
        shares.leave()


# Computes all the time, until its input ends.
_BUSY = """
import os, select, sys
from pathlib import Path
from tandem.worker.cpu import core_shares
from tandem.worker.cpu.core_shares import CoreShares

core_shares._BUSY_NS = 300_000_000
os.sched_getaffinity = lambda _: set(range(64))
shares = CoreShares(Path(sys.argv[1]), 3)
shares.borrow()
print("busy", flush=True)
while not select.select([sys.stdin], [], [], 0.01)[0]:
    shares.borrow()
"""


@contextmanager
def _other_process(path: Path) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", _BUSY, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(_REPOSITORY)},
    )
    assert process.stdin is not None
    assert process.stdout is not None
    with closing(process.stdin), closing(process.stdout):
        try:
            assert process.stdout.readline() == "busy\n"
            yield process
        finally:
            process.kill()
            process.wait()
