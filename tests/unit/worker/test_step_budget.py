"""A worker learns how many tokens of prompts keep a step within a time."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tandem.worker.step_budget import StepBudget


@dataclass(frozen=True)
class Engine:
    """Seconds of a step, of a sequence, of a token."""

    step: float
    row: float
    token: float

    def seconds(self, num_rows: int, num_tokens: int) -> float:
        return self.step + self.row * num_rows + self.token * num_tokens


engines = st.builds(Engine, st.floats(1e-3, 0.05), st.floats(0, 1e-3), st.floats(5e-6, 2e-3))


def run(budget: StepBudget, engine: Engine, rng: random.Random, num: int, noise: float = 0.0) -> None:
    """Steps of any kind."""
    for _ in range(num):
        rows, tokens = rng.randrange(64), rng.choice((0, 0, 32, 100, 256, 512))
        budget.note(rows, tokens, engine.seconds(rows, tokens) * (1 + rng.uniform(-noise, noise)))


@pytest.mark.long
@given(engines, st.integers(0, 63), st.integers(16, 1024), st.sampled_from((0.0, 0.2)))
def test_a_budget_fills_the_time_and_no_more(engine: Engine, rows: int, tokens: int, noise: float) -> None:
    assume(not noise or engine.token * 256 > engine.step)  # else tokens cost next to nothing beside the noise
    budget, rng = StepBudget(), random.Random(1)
    run(budget, engine, rng, 300, noise)
    target = engine.seconds(rows, tokens)
    most = budget.most_tokens(rows, target)
    assert most is not None
    taken, least = engine.seconds(rows, most), engine.seconds(rows, 0)
    assert taken <= target * (1.05 + noise / 2) or most == 0
    # All of the time but the tenth that is kept back, and what noise makes unsure.
    assert taken >= min(target, (0.85 - noise / 2) * target - 0.25 * least) - engine.token


@pytest.mark.long
@given(engines)
def test_it_follows_when_everything_takes_twice_as_long(engine: Engine) -> None:
    budget, rng = StepBudget(), random.Random(2)
    run(budget, engine, rng, 300)
    slower = Engine(2 * engine.step, 2 * engine.row, 2 * engine.token)
    run(budget, slower, rng, 300)
    for rows, tokens in ((0, 0), (8, 100), (60, 500)):
        assert budget.seconds(rows, tokens) == pytest.approx(slower.seconds(rows, tokens), rel=0.1)


def test_nothing_is_bounded_before_it_is_known() -> None:
    budget = StepBudget()
    assert budget.most_tokens(4, 0.05) is None
    for _ in range(100):
        budget.note(4, 0, 0.02)
    assert budget.most_tokens(4, 0.05) is None, "no prompt has been computed"
    for _ in range(8):
        budget.note(4, 128, 0.04)
    assert budget.most_tokens(4, 0.05) is not None


def test_steps_that_are_all_alike_for_long_do_not_spoil_it() -> None:
    engine, budget, rng = Engine(0.01, 1e-4, 1e-4), StepBudget(), random.Random(3)
    run(budget, engine, rng, 200)
    for _ in range(40_000):
        budget.note(8, 0, engine.seconds(8, 0))
    run(budget, engine, rng, 40)
    for rows, tokens in ((8, 0), (8, 128), (32, 512)):
        assert budget.seconds(rows, tokens) == pytest.approx(engine.seconds(rows, tokens), rel=0.05)


def test_a_step_that_was_held_up_hardly_counts() -> None:
    engine, budget, rng = Engine(0.01, 1e-4, 1e-4), StepBudget(), random.Random(4)
    run(budget, engine, rng, 300)
    before = budget.most_tokens(8, 0.05)
    budget.note(8, 128, 30.0)
    run(budget, engine, rng, 5)
    after = budget.most_tokens(8, 0.05)
    assert before is not None
    assert after is not None
    assert after >= before / 2


def test_a_time_that_no_step_keeps_leaves_no_room() -> None:
    budget = StepBudget()
    run(budget, Engine(0.05, 1e-3, 1e-4), random.Random(5), 100)
    assert budget.most_tokens(32, 0.03) == 0


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("tokens_of", [lambda n: 256, lambda n: 512 * (n % 400 == 0)], ids=["always", "seldom"])
def test_what_it_knows_stays_right_for_as_long_as_it_runs(tokens_of: Callable[[int], int], seed: int) -> None:
    """Loads that teach little: one that changes seldom, and one in which prompts are rare."""
    engine, budget, rng = Engine(5e-3, 1e-4, 2e-5), StepBudget(), random.Random(seed)
    run(budget, engine, rng, 20, 0.1)
    for number in range(20_000):
        rows, tokens = 20 + 10 * (number // 500 % 2), tokens_of(number)
        budget.note(rows, tokens, engine.seconds(rows, tokens) * (1 + rng.uniform(-0.1, 0.1)))
    for rows, tokens in ((20, 0), (25, 256), (30, 512)):
        assert budget.seconds(rows, tokens) == pytest.approx(engine.seconds(rows, tokens), rel=0.25)
    assert budget.most_tokens(25, engine.seconds(25, 256) / 0.9) == pytest.approx(256, rel=0.3)
