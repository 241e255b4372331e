"""What is foreseen of handoffs, and for how long a step begins later for one."""

from __future__ import annotations

import threading
import time

import pytest

from decode_worker.upcoming import Due, Forecast, Patience, Upcoming


def test_layers_that_arrive_one_by_one_foretell_the_last() -> None:
    forecast = Forecast(4)
    assert forecast.complete_s() is None
    forecast.arrived({0}, 10.0)
    assert forecast.complete_s() is None, "the layer may have taken any time"
    forecast.arrived({1}, 12.0)
    assert forecast.complete_s() == 16.0
    forecast.arrived({2}, 13.0)
    assert forecast.complete_s() == 14.5, "the mean of both"
    forecast.arrived({3}, 20.0)
    assert (forecast.complete_s(), forecast.num_left) == (20.0, 0)


def test_layers_that_arrive_together_say_nothing_of_how_long_one_takes() -> None:
    forecast = Forecast(6)
    forecast.arrived({0, 1, 2}, 10.0)
    assert forecast.complete_s() is None
    forecast.arrived({3}, 11.0)
    assert forecast.complete_s() == 13.0
    forecast.arrived({3, 1}, 15.0)  # written once more
    assert (forecast.complete_s(), forecast.last_s) == (13.0, 11.0)


def test_all_at_once_is_complete() -> None:
    forecast = Forecast(2)
    forecast.arrived({0, 1}, 3.0)
    assert forecast.complete_s() == 3.0


def test_patience_is_part_of_a_step_and_of_all_steps() -> None:
    patience = Patience(0.05)
    assert patience.left_s == 0
    patience.stepped(0.020)
    assert patience.left_s == pytest.approx(0.001)
    for _ in range(100):
        patience.stepped(0.020)
    assert patience.left_s == pytest.approx(0.010)
    patience.waited(0.004)
    assert patience.left_s == pytest.approx(0.006)


def test_a_wait_that_took_too_long_is_paid_back() -> None:
    patience = Patience(0.05)
    patience.waited(0.010)
    for _ in range(10):
        assert patience.left_s == 0
        patience.stepped(0.020)
    patience.stepped(0.020)
    assert patience.left_s == pytest.approx(0.001)


def test_no_patience_at_all() -> None:
    patience = Patience(0.0)
    for _ in range(100):
        patience.stepped(0.020)
    assert patience.left_s == 0


def test_one_long_step_is_no_usual_one() -> None:
    """A replay, or the process was stopped: the next step is one of the others again."""
    patience = Patience(0.05)
    for _ in range(100):
        patience.stepped(0.020)
    for _ in range(3):
        patience.stepped(0.8)
    assert patience.left_s == pytest.approx(0.010)
    patience.stepped(0.8)
    assert patience.left_s == pytest.approx(0.05), "all are now"


@pytest.mark.parametrize(("in_s", "longest_s", "is_near"), [(1, 2, True), (2, 1, False), (-1, 2, True), (-2, 1, False)])
def test_near_is_what_is_due_soon_or_was_lately(in_s: float, longest_s: float, is_near: bool) -> None:
    upcoming = Upcoming()
    assert upcoming.next_within(longest_s) is None
    due = Due(time.monotonic() + in_s, 7)
    upcoming.foresee([due])
    assert upcoming.next_within(longest_s) == (due if is_near else None)
    upcoming.foresee([])
    assert upcoming.next_within(longest_s) is None


def test_one_that_stands_still_hides_no_other() -> None:
    upcoming, now_s = Upcoming(), time.monotonic()
    dues = [Due(now_s - 50, 1), Due(now_s + 5, None), Due(now_s + 5, 2), Due(now_s + 1, 3)]
    upcoming.foresee(dues)
    assert upcoming.next_within(10) == dues[3]


def test_a_wait_ends_with_the_next_handoff_that_ends() -> None:
    upcoming = Upcoming()
    waiting = threading.Thread(target=upcoming.wait, args=(0, 30))
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive()
    upcoming.ended()
    waiting.join(10)
    assert not waiting.is_alive()
    began_s = time.monotonic()
    upcoming.wait(0, 30)  # it has ended meanwhile
    assert time.monotonic() - began_s < 10
    upcoming.wait(1, 0.01)
    assert upcoming.num_ended == 1
