"""The bounded queue, on a clock that we move."""

from __future__ import annotations

import pytest

from router.admission import Admission
from tandem.core.clock import VirtualClock
from tandem.core.errors import DrainingError, OverloadedError


def test_the_bound_holds_and_places_come_back() -> None:
    admission = Admission(2, VirtualClock())
    admission.enter(2)
    with pytest.raises(OverloadedError, match="bound is 2"):
        admission.enter()
    admission.leave()
    admission.enter()
    assert admission.num_waiting == 2


def test_several_prompts_enter_together_or_not_at_all() -> None:
    admission = Admission(3, VirtualClock())
    admission.enter(2)
    with pytest.raises(OverloadedError):
        admission.enter(2)
    assert admission.num_waiting == 2


def test_retry_after_follows_the_recent_rate() -> None:
    clock = VirtualClock()
    admission = Admission(100, clock)
    assert admission.retry_after_s() == 1.0
    admission.enter(100)
    for _ in range(10):
        clock.advance(0.5)
        admission.leave()
    # 10 in 4.5 s; half of 90 would take 20.25 s
    assert admission.retry_after_s() == 21.0
    clock.advance(10_000)
    assert admission.retry_after_s() == 60.0


def test_a_draining_router_takes_nothing() -> None:
    admission = Admission(2, VirtualClock())
    admission.is_draining = True
    with pytest.raises(DrainingError):
        admission.enter()


def test_leaving_an_empty_queue_is_a_defect() -> None:
    with pytest.raises(ValueError, match="nobody"):
        Admission(2, VirtualClock()).leave()
