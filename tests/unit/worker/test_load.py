"""A worker's load has each request that has come, exactly once, whatever step is under way."""

from __future__ import annotations

from tandem.core.pages import PagePool
from tandem.worker.batch import SchedulerLimits
from tandem.worker.load import LoadReport, LoadSnapshot
from tandem.worker.scheduler import BatchScheduler


def make() -> tuple[LoadReport, list[int]]:
    """A report, and how often it has said that it changed."""
    changes: list[int] = []
    scheduler = BatchScheduler(PagePool(8, 16), SchedulerLimits(4, 64, 64, 8), salt=b"m", prefix_cache=False)
    return LoadReport(scheduler, lambda: changes.append(1), lambda: None), changes


def figures(snapshot: LoadSnapshot) -> tuple[int, int, int]:
    return snapshot.num_queued, snapshot.num_queued_tokens, snapshot.num_incoming


def test_what_comes_during_a_step_counts_at_once_and_once() -> None:
    load, changes = make()
    one, two = load.arriving(100), load.arriving(50)
    assert figures(load.newest) == (2, 150, 0)
    assert len(changes) == 2
    load.taken_in(one)
    assert load.is_behind
    assert figures(load.newest) == (2, 150, 0), "until a snapshot shows it"
    load.take(1, 100)
    assert not load.is_behind
    assert figures(load.newest) == (2, 150, 0)
    load.taken_in(two)
    load.take(1, 80, 2)
    assert figures(load.newest) == (1, 80, 2), "the second one was refused, the first one is under way"


def test_a_snapshot_that_changes_nothing_is_told_to_nobody() -> None:
    load, changes = make()
    load.take(0, 0)
    assert not changes
    load.taken_in(load.arriving(10))
    load.take(0, 0)
    load.take(0, 0)
    assert len(changes) == 2, "it came, and was refused"
