"""The bucket of retries, on a clock that we move."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.policy.retry_budget import RetryBudget
from tandem.core.clock import VirtualClock


def spend(budget: RetryBudget) -> int:
    """Draw until it is empty; how many there were."""
    num = 0
    while budget.draw():
        num += 1
    return num


def test_a_burst_is_allowed_and_then_only_what_requests_earn() -> None:
    budget = RetryBudget(0.1, 10, VirtualClock())
    assert spend(budget) == 10
    for _ in range(35):
        budget.earn()
    assert spend(budget) == 3
    assert budget.num_refused == 2
    for _ in range(5):
        budget.earn()
    assert spend(budget) == 1, "the odd half of a retry is not lost"


def test_what_is_saved_up_never_exceeds_the_burst() -> None:
    clock = VirtualClock()
    budget = RetryBudget(0.5, 10, clock)
    for _ in range(1000):
        budget.earn()
    clock.advance(3600)
    assert spend(budget) == 10


@pytest.mark.parametrize("burst", [10, 1024])
def test_a_quiet_cluster_comes_by_three_retries_a_minute_whatever_the_burst(burst: int) -> None:
    clock = VirtualClock()
    budget = RetryBudget(0.1, burst, clock)
    spend(budget)
    clock.advance(60)
    assert spend(budget) == 3
    clock.advance(3600 * 24)
    assert budget.num_left == burst


def test_with_a_share_of_nothing_there_is_the_first_burst_alone() -> None:
    clock = VirtualClock()
    budget = RetryBudget(0.0, 10, clock)
    assert spend(budget) == 10
    clock.advance(3600)
    budget.earn()
    assert spend(budget) == 0


def test_a_request_a_second_that_always_fails_is_retried_for_about_the_share() -> None:
    clock, num_retries = VirtualClock(), 0
    budget = RetryBudget(0.1, 64, clock)
    spend(budget)
    for _ in range(6000):
        clock.advance(1.0)
        budget.earn()
        num_retries += budget.draw()
    assert 600 <= num_retries <= 600 + 3 * 100


def test_all_routers_together_have_the_budget_of_one() -> None:
    clock, num_routers = VirtualClock(), 4
    budgets = [RetryBudget(0.1, 64, clock, lambda: num_routers) for _ in range(num_routers)]
    assert [spend(budget) for budget in budgets] == [16] * 4
    clock.advance(60.0 * 4)
    assert [spend(budget) for budget in budgets] == [3] * 4, "three a minute among them"
    for _ in range(200):
        budgets[0].earn()
    assert budgets[0].num_left == 16, "its share of the burst"
    num_routers = 1  # the others are gone
    for _ in range(200):
        budgets[0].earn()
    assert 35 < budgets[0].num_left <= 64
    num_routers = 2
    assert budgets[0].num_left == 32


@given(st.floats(0, 1), st.integers(1, 20), st.lists(st.one_of(st.just("earn"), st.just("draw"), st.floats(0, 30))))
def test_retries_stay_within_the_share_of_requests_the_burst_and_the_time(
    share: float, burst: int, steps: list[str | float]
) -> None:
    clock = VirtualClock()
    budget = RetryBudget(share, burst, clock)
    num_requests = num_retries = 0
    for step in steps:
        if isinstance(step, float):
            clock.advance(step)
        elif step == "earn":
            budget.earn()
            num_requests += 1
        else:
            num_retries += budget.draw()
        assert 0 <= budget.num_left <= burst
        assert num_retries <= burst + share * num_requests + clock.now() * (3 / 60 if share > 0 else 0) + 1e-6


def test_with_more_routers_than_retries_each_still_has_one() -> None:
    budgets = [RetryBudget(0.1, 10, VirtualClock(), lambda: 64) for _ in range(64)]
    assert [spend(budget) for budget in budgets] == [1] * 64
