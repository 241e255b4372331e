"""A worker learns with how many tokens of prompts in a step all together wait least."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.worker.prompt_room import PromptRoom

StepS = Callable[[int, int], float]
"""Of a step for so many sequences with so many tokens of prompts."""


def in_proportion(step_s: float, row_s: float, token_s: float) -> StepS:
    return lambda rows, tokens: step_s + row_s * rows + token_s * tokens


def bound_by_reading(overhead_s: float, read_s: float, token_s: float) -> StepS:
    """Whichever takes longer: to read the weights, or to compute the tokens."""
    return lambda rows, tokens: overhead_s + max(read_s, token_s * (rows + tokens))


def learn(room: PromptRoom, step_s: StepS, rows: int, target_s: float, *, prompts: int = 1, noise: float = 0.0) -> None:
    """Steps as the worker would take them, of which every fifth ends a prompt, and some have none."""
    rng = random.Random(1)
    for number in range(400):
        tokens = room.tokens(rows, prompts, target_s, 2048) if number % 8 else 0
        if number % 5 == 4:
            tokens = max(tokens and 1, round(tokens * rng.random()))
        room.note(rows, tokens, step_s(rows, tokens) * (1 + rng.uniform(-noise, noise)))


def delay(step_s: StepS, rows: int, prompts: int, tokens: int) -> float:
    """Of all together, by one token: of the prompts that wait and of as many behind them, and of who generates."""
    plain_s, all_s = step_s(rows, 0), step_s(rows, tokens)
    return (2 * prompts * all_s + rows * (all_s - plain_s)) / tokens


def least_delay(step_s: StepS, rows: int, prompts: int, target_s: float) -> float:
    """Of any number that leaves a fifth of the wanted time and more."""
    able = [tokens for tokens in range(1, 2049) if step_s(rows, tokens) <= 0.8 * target_s]
    return min((delay(step_s, rows, prompts, tokens) for tokens in able), default=float("inf"))


@pytest.mark.long
@settings(deadline=None, max_examples=60)
@given(
    st.floats(0.002, 0.02),
    st.floats(1e-5, 2e-3),
    st.integers(0, 40),
    st.integers(1, 10),
    st.floats(0.03, 0.3),
    st.sampled_from((0.0, 0.1)),
)
def test_the_time_is_kept_and_all_together_wait_not_much_longer_than_they_must(
    step_s: float, token_s: float, rows: int, prompts: int, target_s: float, noise: float
) -> None:
    room, takes = PromptRoom(), in_proportion(step_s, 1e-4, token_s)
    learn(room, takes, rows, target_s, prompts=prompts, noise=noise)
    tokens = room.tokens(rows, prompts, target_s, 2048)
    assert takes(rows, tokens) <= (1.0 + noise) * target_s
    least = least_delay(takes, rows, prompts, (1 - noise) * target_s)
    able_s = 1.05 * least + 0.2 * rows * token_s  # of what is tried, which are powers of two
    assert least == float("inf") or delay(takes, rows, prompts, max(1, tokens)) <= (1.3 if noise else 1.1) * able_s


def test_steps_are_no_longer_than_is_of_use() -> None:
    """Where a token takes a tenth of a step, hundreds of them are hardly better than twenty for four who generate; not
    so where ten prompts wait and one generates."""
    room, takes = PromptRoom(), in_proportion(0.01, 1e-4, 1e-3)
    learn(room, takes, 4, 1.0)
    assert 16 <= room.tokens(4, 1, 1.0, 2048) <= 40
    room = PromptRoom()
    learn(room, takes, 1, 1.0, prompts=10)
    assert room.tokens(1, 10, 1.0, 2048) >= 100


def test_the_tokens_are_taken_that_cost_those_who_generate_nothing() -> None:
    """Weights are read for 6 ms, in which 150 tokens are computed; beyond them 20 sequences would wait."""
    room, takes = PromptRoom(), bound_by_reading(0.001, 0.006, 4e-5)
    learn(room, takes, 20, 0.05)
    assert 100 <= room.tokens(20, 1, 0.05, 2048) <= 170
    assert takes(20, room.tokens(20, 1, 0.05, 2048)) <= 1.2 * takes(20, 0)
    told = room.steps(20, 1, 0.05, 2048)
    assert told.seconds(1000) == pytest.approx(1000 / 130 * 0.007, rel=0.3)


def test_prompts_that_come_before_anybody_generates_teach_no_wrong_price() -> None:
    """A worker that has just started computes prompts first. What it takes then is what it would take had it generated
    before."""
    room, takes = PromptRoom(), bound_by_reading(0.001, 0.006, 4e-5)
    for _ in range(8):
        tokens = room.tokens(0, 1, 0.05, 2048)
        room.note(0, tokens, takes(0, tokens))
    assert tokens > 300
    learn(room, takes, 20, 0.05)
    assert 100 <= room.tokens(20, 1, 0.05, 2048) <= 170
    assert room.steps(20, 1, 0.05, 2048).token_s < 1e-5


def test_where_many_prompts_wait_or_nobody_generates_steps_are_filled() -> None:
    """What a step takes besides is then shared by more tokens."""
    takes = bound_by_reading(0.002, 0.004, 4e-5)
    for rows, prompts in ((2, 20), (0, 1)):
        room = PromptRoom()
        learn(room, takes, rows, 0.05, prompts=prompts)
        assert room.tokens(rows, prompts, 0.05, 2048) >= 400


def test_a_time_that_no_step_keeps_leaves_no_tokens() -> None:
    room = PromptRoom()
    learn(room, in_proportion(0.05, 1e-3, 1e-4), 32, 0.5)
    assert room.tokens(32, 5, 0.05, 2048) == 0
    assert room.steps(32, 5, 0.05, 2048).num_tokens == 0


def test_the_first_steps_try_no_more_than_what_was_tried_allows() -> None:
    room, takes, tried = PromptRoom(), in_proportion(0.01, 0.0, 1e-3), [0]
    for _ in range(20):
        room.note(4, 0, takes(4, 0))
    while len(tried) < 12:
        tried.append(room.tokens(4, 1, 0.2, 2048))
        room.note(4, tried[-1], takes(4, tried[-1]))
        assert takes(4, tried[-1]) <= 0.2
    assert tried[1:3] == [16, 32]
    assert all(after <= 2 * before for before, after in pairwise(tried[1:]))
    assert delay(takes, 4, 1, tried[-1]) <= 1.2 * least_delay(takes, 4, 1, 0.2)


def test_a_step_that_was_held_up_hardly_counts() -> None:
    room, takes = PromptRoom(), in_proportion(0.01, 1e-4, 1e-4)
    learn(room, takes, 1, 0.05)
    room.note(1, before := room.tokens(1, 1, 0.05, 2048), 30.0)
    for _ in range(5):
        room.note(1, before, takes(1, before))
    after = room.tokens(1, 1, 0.05, 2048)
    assert delay(takes, 1, 1, after) <= 1.2 * least_delay(takes, 1, 1, 0.05)


def test_it_follows_when_everything_takes_twice_as_long() -> None:
    room = PromptRoom()
    learn(room, in_proportion(0.01, 1e-4, 2e-4), 8, 0.1)
    slower = in_proportion(0.02, 2e-4, 4e-4)
    learn(room, slower, 8, 0.1)
    tokens = room.tokens(8, 1, 0.1, 2048)
    assert slower(8, tokens) <= 0.1
    assert delay(slower, 8, 1, tokens) <= 1.2 * least_delay(slower, 8, 1, 0.1)


@pytest.mark.parametrize(("at", "stall_s"), [(16, 5.0), (32, 0.5), (64, 1.0), (256, 1.0), (512, 2.0)])
def test_a_step_that_was_held_up_is_not_held_against_its_tokens_for_ever(at: int, stall_s: float) -> None:
    """The first one with so many tokens: a kernel that is compiled, a core that somebody else took."""
    takes = in_proportion(0.01, 0.0, 1e-4)

    def settled(stall_s: float) -> int:
        room, is_to_come = PromptRoom(), stall_s > 0
        for number in range(6000):
            tokens = room.tokens(1, 1, 0.2, 2048) if number % 8 else 0
            stalls = is_to_come and tokens >= at
            is_to_come = is_to_come and not stalls
            room.note(1, tokens, takes(1, tokens) + stalls * stall_s)
        return room.tokens(1, 1, 0.2, 2048)

    assert settled(stall_s) >= 0.9 * settled(0.0) > 100


def test_a_worker_whose_only_step_with_prompts_was_held_up_takes_prompts_again() -> None:
    room = PromptRoom()
    for _ in range(10):
        room.note(8, 0, 0.01)
    room.note(8, 16, 5.0)
    assert room.steps(8, 0, 0.05, 2048).num_tokens == 0
    for _ in range(4500):
        room.note(8, 0, 0.01)
    assert room.steps(8, 0, 0.05, 2048).num_tokens > 0
