"""Gaps between tokens, of which a step gives many at once: the figures of `tandem bench`."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.bench.load.records import RequestRecord
from tandem.bench.report.summary import distribution, itl_over_time
from tandem.sim.gaps import Gaps
from tandem.sim.load import Lengths, drawn
from tandem.sim.scenario import Scenario
from tandem.sim.world import World


@pytest.mark.long
@given(st.lists(st.lists(st.floats(0.001, 5.0), min_size=2, max_size=12), min_size=1, max_size=8))
def test_the_figures_are_those_of_each_gap_by_itself(all_gaps: list[list[float]]) -> None:
    records, gaps = [], Gaps()
    for number, each in enumerate(all_gaps):
        times = [sum(each[:index]) for index in range(len(each) + 1)]
        records.append(RequestRecord(number, 1, len(times), 0.0, times[-1], event_s=tuple(times)))
        for before, after in pairwise(times):
            gaps.note(after, after - before)
    expected, found = distribution([gap for record in records for gap in record.itl_s]), gaps.distribution()
    assert expected is not None
    assert found is not None
    names = ("num", "mean", "p50", "p90", "p99", "max")
    assert [getattr(found, name) for name in names] == pytest.approx([getattr(expected, name) for name in names])
    for window, other in zip(gaps.windows(1.0), itl_over_time(records, 1.0), strict=True):
        assert (window.at_s, window.num) == (other.at_s, other.num)
        assert (window.p50, window.p99) == pytest.approx((other.p50, other.p99))


def test_equal_gaps_are_one_entry_and_count_as_many() -> None:
    one, many = Gaps(), Gaps()
    for end_s, gap_s, num in ((1.0, 0.1, 3), (1.0, 0.1, 2), (2.0, 0.4, 5)):
        one.note(end_s, gap_s, num)
        for _ in range(num):
            many.note(end_s, gap_s)
    assert one.distribution() == many.distribution()
    assert one.windows(1.0) == many.windows(1.0)
    assert Gaps().distribution() is None
    assert Gaps().windows(1.0) == ()


def test_steps_taken_at_once_have_the_gaps_of_steps_one_by_one() -> None:
    load, shape = drawn(40, 20.0, Lengths(300, 0.5), Lengths(30, 0.5), 0), Scenario().shape()
    worlds = [World(shape, gaps=Gaps(), at_once=at_once) for at_once in (True, False)]
    outcomes = [world.run(load) for world in worlds]
    found = [world.gaps.distribution() for world in worlds if world.gaps is not None]
    assert found[0] is not None
    assert found[1] is not None
    assert found[0].num == found[1].num == sum(one.num_tokens - 1 for one in outcomes[0])
    assert (found[0].mean, found[0].p99, found[0].max) == pytest.approx((found[1].mean, found[1].p99, found[1].max))
    assert found[0].max == pytest.approx(max(one.longest_gap_s for one in outcomes[0]))
