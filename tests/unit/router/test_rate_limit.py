"""Limits a minute: what a bucket lets in over time, its debt, and the shares of routers."""

from __future__ import annotations

import random

import pytest

from router.policy.rate_limit import Limits, RateLimit


def test_a_full_bucket_is_a_minutes_worth_and_fills_at_that_rate() -> None:
    limits = Limits(requests_per_minute=60, tokens_per_minute=0)
    rate = RateLimit(limits, 0.0)
    for _ in range(60):
        assert rate.wait_s(1000) == 0
        rate.take(num_requests=1)
    assert rate.wait_s(1) == pytest.approx(1.0)
    rate.look(limits, 1.0)
    assert rate.wait_s(1) == 0
    assert rate.states["requests"].full_in_s == pytest.approx(59.0)


def test_tokens_of_answers_make_a_debt_that_is_paid_before_the_next() -> None:
    limits = Limits(0, 600)
    rate = RateLimit(limits, 0.0)
    rate.take(num_tokens=100)
    rate.take(num_tokens=700)  # of an answer
    assert rate.states["tokens"].num_left == 0
    assert rate.wait_s(0) == pytest.approx(20.1)
    rate.look(limits, 20.2)
    assert rate.wait_s(1) == 0 < rate.wait_s(600)


def test_a_prompt_larger_than_the_limit_comes_when_nothing_is_used() -> None:
    rate = RateLimit(Limits(0, 100), 0.0)
    assert rate.wait_s(5000) == 0
    rate.take(num_tokens=1)
    assert 0 < rate.wait_s(5000) < 1


def test_each_router_has_a_share_that_is_never_nothing() -> None:
    assert Limits(10, 0).share(4) == Limits(3, 0)
    assert Limits(1, 1).share(8) == Limits(1, 1)


def test_a_limit_that_changes_holds_at_once() -> None:
    rate = RateLimit(Limits(600, 0), 0.0)
    rate.look(Limits(60, 600), 1.0)
    assert {name: state.num_left for name, state in rate.states.items()} == {"requests": 60, "tokens": 600}
    rate.look(Limits(0, 0), 2.0)
    assert rate.wait_s(10_000) == 0
    assert rate.states == {}


def test_over_any_time_no_more_comes_than_a_bucket_and_the_rate() -> None:
    draw = random.Random(7)
    limits = Limits(120, 6000)
    rate, now_s, came, tokens = RateLimit(limits, 0.0), 0.0, 0, 0
    while now_s < 600:
        now_s += draw.expovariate(10)
        rate.look(limits, now_s)
        size = draw.randrange(1, 200)
        if rate.wait_s(size) == 0:
            rate.take(num_requests=1, num_tokens=size)
            came, tokens = came + 1, tokens + size
    assert came <= 120 + 2 * now_s
    assert tokens <= 6000 + 100 * now_s
    assert tokens > 0.9 * 100 * now_s, "what is allowed can be had"
