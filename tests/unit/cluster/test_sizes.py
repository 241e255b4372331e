"""Who decides on a pool's size: orders, and the load where it may."""

from __future__ import annotations

from tandem.cluster.supervisor.autoscale import Range
from tandem.cluster.supervisor.events import GrowthRefused, Intent, LoadFollowed, PoolSize, WantedChanged
from tandem.cluster.supervisor.sizes import Sizes
from tandem.core.identity import Role

WANTED = {Role.PREFILL: 2, Role.DECODE: 1, Role.ROUTER: 1}


def sizes(**ranges: Range) -> Sizes:
    found = Sizes()
    found.open(Intent(WANTED, ranges={Role(role): bounds for role, bounds in ranges.items()}))
    return found


def test_a_fixed_pool_does_not_follow_its_load() -> None:
    found = sizes()
    found.take(LoadFollowed(Role.PREFILL, 4))
    found.take(GrowthRefused(Role.PREFILL, "no memory"))
    assert found.wanted == WANTED
    assert found.told == (PoolSize(Role.PREFILL, 2, 2, 2), PoolSize(Role.DECODE, 1, 1, 1))


def test_what_the_load_changes_is_counted() -> None:
    found = sizes(prefill=Range(1, 4))
    for workers in (4, 3, 2):
        found.take(LoadFollowed(Role.PREFILL, workers))
    found.take(GrowthRefused(Role.PREFILL, "no memory"))
    assert found.told[0] == PoolSize(Role.PREFILL, 2, 1, 4, num_grown=1, num_shrunk=2, num_refused=1)


def test_an_ordered_size_ends_that_a_pool_follows_its_load_and_a_range_lets_it_again() -> None:
    found = sizes(prefill=Range(1, 4))
    found.take(WantedChanged(Role.PREFILL, 3))
    assert not found.ranges
    found.take(LoadFollowed(Role.PREFILL, 4))
    assert found.wanted[Role.PREFILL] == 3
    found.take(WantedChanged(Role.PREFILL, 1, 8))
    assert (found.wanted[Role.PREFILL], found.ranges) == (3, {Role.PREFILL: Range(1, 8)}), "inside, it stays as it is"
    found.take(WantedChanged(Role.PREFILL, 5, 8))
    assert found.wanted[Role.PREFILL] == 5
    found.take(WantedChanged(Role.PREFILL, 1, 2))
    assert found.wanted[Role.PREFILL] == 2
