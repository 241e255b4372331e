"""A long context costs a step no more than a short one."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks.host.steps import PAGE_SIZE, Steps
from tandem.core.pages import PagePool

NUM = 3


def admitted(context: int) -> Steps:
    steps = Steps(NUM, context)
    steps.admit()
    return steps


def edges(steps: Steps) -> int:
    """What the garbage collector has to look at of all that an admission has brought, but pages, a number for many
    tokens: those are looked at once."""
    seen: dict[int, Any] = {}
    num_edges = 0
    to_do: list[Any] = list(steps._scheduler.running)
    while to_do:
        one = to_do.pop()
        if id(one) in seen or isinstance(one, type) or callable(one):
            continue
        seen[id(one)] = one
        assert not isinstance(one, PagePool)
        found = gc.get_referents(one)
        num_edges += len(found)
        to_do += found
    return num_edges


def test_the_collector_has_as_much_to_look_at_for_a_long_context_as_for_a_short_one() -> None:
    short, long = admitted(100), admitted(40_000)
    assert edges(long) == edges(short)
    for steps in (short, long):
        steps.times_s(3)
    assert edges(long) == edges(short)


class Noted:
    """The token ids of a sequence, of which each read is counted by how many it is of."""

    def __init__(self, ids: Any) -> None:
        self.ids = ids
        self.num_read = 0

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: Any) -> Any:
        found = self.ids[index]
        self.num_read += len(found) if isinstance(index, slice) else 1
        return found

    def __iter__(self) -> Iterator[int]:
        self.num_read += len(self.ids)
        return iter(self.ids)

    def extend(self, ids: list[int]) -> None:
        self.ids.extend(ids)


@pytest.mark.parametrize("context", [1000, 40_000])
def test_a_step_reads_the_newest_token_and_once_each_of_a_page_that_fills(context: int) -> None:
    steps = admitted(context)
    noted = []
    for sequence in steps._scheduler.running:
        noted.append(Noted(sequence.token_ids))
        sequence.token_ids = noted[-1]  # type: ignore[assignment]
    places = [each.ids.buffer_info()[0] for each in noted]
    steps.times_s(PAGE_SIZE)
    assert [each.num_read for each in noted] == [2 * PAGE_SIZE] * NUM
    assert [each.ids.buffer_info()[0] for each in noted] == places, "none was copied"
