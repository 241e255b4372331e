"""When a worker is left alone for good; the clock is turned by hand."""

from __future__ import annotations

import asyncio

import pytest

from tandem.worker.orphan import ORPHAN_LEASES, OrphanWatch
from tests.support.waiting import until

ORPHAN_S = 10.0 * ORPHAN_LEASES


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def watch(clock: Clock) -> OrphanWatch:
    return OrphanWatch(10.0, now_s=clock)


def test_a_worker_is_an_orphan_when_neither_supervisor_nor_router_has_been_there_for_long(
    watch: OrphanWatch, clock: Clock
) -> None:
    watch.supervised()
    clock.now_s = ORPHAN_S
    assert not watch.look(num_routers=0)
    clock.now_s += 1
    assert watch.look(num_routers=0)


def test_one_whose_supervisor_is_away_lives_as_long_as_a_router_is_there(watch: OrphanWatch, clock: Clock) -> None:
    watch.supervised()
    for _ in range(100):
        clock.now_s += ORPHAN_S - 1
        assert not watch.look(num_routers=1)
    clock.now_s += ORPHAN_S - 1
    assert not watch.look(num_routers=0)


def test_one_whose_routers_are_away_lives_as_long_as_its_supervisor_asks(watch: OrphanWatch, clock: Clock) -> None:
    for _ in range(100):
        watch.supervised()
        clock.now_s += ORPHAN_S - 1
        assert not watch.look(num_routers=0)


def test_one_that_never_had_a_supervisor_is_no_orphan(watch: OrphanWatch, clock: Clock) -> None:
    """A plain process, which whoever started it ends."""
    clock.now_s = 1000 * ORPHAN_S
    assert not watch.look(num_routers=0)


async def test_who_waits_is_told(clock: Clock) -> None:
    watch = OrphanWatch(0.01, now_s=clock)
    watch.supervised()
    told = asyncio.create_task(asyncio.to_thread(watch.wait))
    watching = asyncio.create_task(watch.watch(lambda: 0))
    clock.now_s = 1.0
    await until(told.done, "told")
    await watching
