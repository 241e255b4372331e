"""The bucket of retries, on a clock that we move."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from router.retry_budget import RetryBudget
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


def test_a_quiet_cluster_has_its_burst_back_within_a_minute() -> None:
    clock = VirtualClock()
    budget = RetryBudget(0.0, 10, clock)
    spend(budget)
    clock.advance(30)
    assert spend(budget) == 5
    clock.advance(60)
    assert budget.num_left == 10


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
        assert num_retries <= burst + share * num_requests + clock.now() * burst / 60 + 1e-6
