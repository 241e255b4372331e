"""For how long a step begins later for a handoff that is about to be admitted."""

from __future__ import annotations

import threading
import time

import pytest

from tandem.worker.cpu.handoff_wait import Due, ExpectedHandoffs, StepDelayBudget


def test_the_budget_is_part_of_a_step_and_of_all_steps() -> None:
    budget = StepDelayBudget(0.05)
    assert budget.left_s == 0
    budget.stepped(0.020)
    assert budget.left_s == pytest.approx(0.001)
    for _ in range(100):
        budget.stepped(0.020)
    assert budget.left_s == pytest.approx(0.010)
    budget.waited(0.004)
    assert budget.left_s == pytest.approx(0.006)


def test_a_wait_that_took_too_long_is_paid_back() -> None:
    budget = StepDelayBudget(0.05)
    budget.waited(0.010)
    for _ in range(10):
        assert budget.left_s == 0
        budget.stepped(0.020)
    budget.stepped(0.020)
    assert budget.left_s == pytest.approx(0.001)


def test_no_budget_at_all() -> None:
    budget = StepDelayBudget(0.0)
    for _ in range(100):
        budget.stepped(0.020)
    assert budget.left_s == 0


def test_one_long_step_is_no_usual_one() -> None:
    """A replay, or the process was stopped: the next step is one of the others again."""
    budget = StepDelayBudget(0.05)
    for _ in range(100):
        budget.stepped(0.020)
    for _ in range(3):
        budget.stepped(0.8)
    assert budget.left_s == pytest.approx(0.010)
    budget.stepped(0.8)
    assert budget.left_s == pytest.approx(0.05), "all are now"


@pytest.mark.parametrize(("in_s", "longest_s", "is_near"), [(1, 2, True), (2, 1, False), (-1, 2, True), (-2, 1, False)])
def test_near_is_what_is_due_soon_or_was_lately(in_s: float, longest_s: float, is_near: bool) -> None:
    expected = ExpectedHandoffs()
    assert expected.next_within(longest_s) is None
    due = Due(time.monotonic() + in_s, "p")
    expected.foresee([due])
    assert expected.next_within(longest_s) == (due if is_near else None)
    expected.foresee([])
    assert expected.next_within(longest_s) is None


def test_one_that_stands_still_hides_no_other() -> None:
    expected, now_s = ExpectedHandoffs(), time.monotonic()
    dues = [Due(now_s - 50, "a"), Due(now_s + 5, "b"), Due(now_s + 5, "c"), Due(now_s + 1, "d")]
    expected.foresee(dues)
    assert expected.next_within(10) == dues[3]


def test_a_wait_ends_with_the_next_handoff_that_ends() -> None:
    expected = ExpectedHandoffs()
    waiting = threading.Thread(target=expected.wait, args=(0, 30))
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive()
    expected.ended()
    waiting.join(10)
    assert not waiting.is_alive()
    began_s = time.monotonic()
    expected.wait(0, 30)  # it has ended meanwhile
    assert time.monotonic() - began_s < 10
    expected.wait(1, 0.01)
    assert expected.num_ended == 1
