"""What a worker takes in, and what it refuses."""

from __future__ import annotations

import pytest

from kvtransfer.protocol.messages import AttemptKey
from tandem.core.errors import InvalidRequestError
from tandem.core.sampling import SamplingParams
from tandem.worker.request import AttemptSpec, ChoiceJournal, RequestLimits
from tandem.worker.validate import open_journals, validate

LIMITS = RequestLimits(vocab_size=10, max_context=8, eos=frozenset({2}), max_choices=4)


def spec(
    prompt: list[int], *journal: ChoiceJournal, num_choices: int = 1, params: SamplingParams | None = None
) -> AttemptSpec:
    return AttemptSpec(
        AttemptKey("request", 1), 0, tuple(prompt), params or SamplingParams(max_tokens=3), num_choices, journal
    )


@pytest.mark.parametrize(
    ("prompt", "words"), [([], "0 tokens"), ([1] * 8, "8 tokens, must have 1 to 7"), ([1, 10, 2], "token 10")]
)
def test_prompts_that_cannot_be_computed(prompt: list[int], words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words) as raised:
        validate(spec(prompt), LIMITS)
    assert (raised.value.field, raised.value.request_id) == ("prompt", "request")


def test_the_longest_and_the_shortest_prompt() -> None:
    validate(spec([9] * 7), LIMITS)
    validate(spec([0]), LIMITS)


def test_more_choices_than_are_allowed() -> None:
    validate(spec([1], num_choices=4), LIMITS)
    with pytest.raises(InvalidRequestError, match="5 choices, at most 4") as raised:
        validate(spec([1], num_choices=5), LIMITS)
    assert (raised.value.field, raised.value.request_id) == ("n", "request")


@pytest.mark.parametrize("choices", [[2], [0, 0], [-1]])
def test_journals_are_of_one_choice_each(choices: list[int]) -> None:
    validate(spec([1], ChoiceJournal(1), ChoiceJournal(0), num_choices=2), LIMITS)
    with pytest.raises(InvalidRequestError, match="of 2 choices"):
        validate(spec([1], *(ChoiceJournal(choice) for choice in choices), num_choices=2), LIMITS)


@pytest.mark.parametrize(
    ("entry", "going_on", "ended"),
    [
        (ChoiceJournal(1), {}, set()),
        (ChoiceJournal(1, finished=True), {}, {1}),
        (ChoiceJournal(1, (5, 6)), {1: [5, 6]}, set()),
        (ChoiceJournal(1, (5, 6), finished=True), {}, {1}),
        (ChoiceJournal(1, (5, 6, 7)), {}, {1}),  # max_tokens
        (ChoiceJournal(1, (5, 2)), {}, {1}),  # end of text
        (ChoiceJournal(1, (2, 5)), {1: [2, 5]}, set()),  # what follows a stop was given out
    ],
)
def test_journals(entry: ChoiceJournal, going_on: dict[int, list[int]], ended: set[int]) -> None:
    assert open_journals(spec([1] * 4, entry), LIMITS) == (going_on, ended)


def test_journals_of_another_model_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="token 10"):
        open_journals(spec([1] * 4, ChoiceJournal(0, (10,))), LIMITS)


def test_a_journal_that_fills_the_context_has_ended() -> None:
    entry = ChoiceJournal(0, (1, 1))
    assert open_journals(spec([1] * 6, entry, params=SamplingParams(max_tokens=16)), LIMITS) == ({}, {0})
