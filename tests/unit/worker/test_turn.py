"""Whose turn it is: urgency first, and nobody waits for ever."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.worker.turn import turn_of

priorities = st.integers(-(1 << 31) + 1, (1 << 31) - 1)
times_s = st.floats(0, 1e7)


@given(priorities, priorities, times_s)
def test_of_those_that_came_together_the_most_urgent_goes_first(one: int, other: int, arrived_s: float) -> None:
    assert (turn_of(one, arrived_s, 10.0) < turn_of(other, arrived_s, 10.0)) == (one < other)


@given(st.integers(0, 1000), st.integers(0, 1000), st.floats(0, 1e4), st.floats(0, 100))
def test_a_level_is_worth_so_many_seconds_and_no_more(
    priority: int, levels: int, arrived_s: float, ageing_s: float
) -> None:
    """Who comes later than that goes behind, however much more urgent it is."""
    later_s = arrived_s + levels * ageing_s + 0.001
    assert turn_of(priority, arrived_s, ageing_s) < turn_of(priority - levels, later_s, ageing_s)


@pytest.mark.parametrize("priority", [-5, 0, 5])
def test_without_ageing_who_comes_first_goes_first(priority: int) -> None:
    assert turn_of(priority, 1.0, 0.0) < turn_of(0, 2.0, 0.0)
