"""What the masks of one output may take."""

from __future__ import annotations

import pytest

from tandem.core.errors import SlowGrammarError
from tandem.worker.mask_budget import BASE_S, TOKEN_S, MaskBudget


def num_tokens_of(each_s: float, most: int = 100_000) -> int:
    """How many tokens an output has before it is ended, whose masks take so long."""
    budget = MaskBudget()
    for number in range(most):
        try:
            budget.spend(1, each_s)
        except SlowGrammarError:
            return number
    return most


def test_what_real_schemas_take_goes_on_for_ever_and_what_is_slow_ends_sooner_the_slower_it_is() -> None:
    """Of 246 schemas with 131,000 tokens the slowest took 0.42 ms a token."""
    assert num_tokens_of(0.0005) == num_tokens_of(TOKEN_S) == 100_000
    assert num_tokens_of(0.01) == pytest.approx(BASE_S / 0.005, abs=2)
    assert num_tokens_of(0.04) == pytest.approx(BASE_S / 0.035, abs=2)


def test_states_of_a_lexer_may_be_made_all_at_once() -> None:
    budget = MaskBudget()
    for seconds in (0.3, 0.3, 0.3):
        budget.spend(1, seconds)
    with pytest.raises(SlowGrammarError, match=r"its first 4 tokens took 1.2 s"):
        budget.spend(1, 0.3)


def test_a_guide_is_slow_until_some_of_its_masks_are_not() -> None:
    budget = MaskBudget()
    assert not budget.is_slow
    budget.spend(1, 0.009)
    for _ in range(2):  # slow ones by turns with quick ones are slow
        budget.spend(1, 0.0001)
        assert budget.is_slow
    budget.spend(1, 0.0001)
    assert not budget.is_slow
