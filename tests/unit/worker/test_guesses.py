"""Tokens are guessed from where the newest ones came before; how many follows how good the guesses were."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.core.sampling import SamplingParams
from tandem.core.token_ids import token_ids
from tandem.worker.guesses import Guesser, Guesses, Lookup
from tandem.worker.sequence import Sequence

PAGE = 16


def looked_through(text: list[int]) -> Lookup:
    lookup = Lookup(token_ids(text), len(text) + 100)
    lookup.note(len(text))
    return lookup


def sequence(text: list[int], *, num_prompt: int | None = None, **params: object) -> Sequence:
    """One that generates: all but its newest token is computed."""
    num_prompt = len(text) - 1 if num_prompt is None else num_prompt
    of_it = SamplingParams(**({"max_tokens": 100} | params))  # type: ignore[arg-type]
    return Sequence("r", 1, 0, 0.0, 0, token_ids(text), num_prompt, of_it, num_computed=len(text) - 1)


def guesses(most: int = 5, num_rows: int = 6) -> Guesses:
    return Guesses(most, num_rows, PAGE, max_context=64, ends=frozenset([99]))


def test_what_came_behind_the_newest_run_comes_again() -> None:
    lookup = looked_through([7, 1, 2, 3, 4, 5, 9, 1, 2, 3])
    assert lookup.next_tokens(3) == [4, 5, 9]
    assert lookup.next_tokens(0) == []
    assert looked_through([4, 5, 6, 1, 2, 3, 7, 9, 1, 2, 3, 8, 4, 5, 6, 1, 2, 3]).next_tokens(1) == [7], "six are surer"
    assert looked_through([1, 2, 3]).next_tokens(4) == []
    assert looked_through([1, 2]).next_tokens(4) == []


def test_the_last_place_counts_and_what_repeats_itself_goes_on() -> None:
    assert looked_through([1, 2, 3, 4, 0, 1, 2, 3, 5, 0, 1, 2, 3]).next_tokens(2) == [5, 0]
    assert looked_through([8, 1, 2, 8, 1, 2, 8]).next_tokens(7) == [1, 2, 8, 1, 2, 8, 1]


@given(st.lists(st.integers(0, 3), max_size=60), st.integers(1, 9))
def test_a_guess_came_behind_the_same_run(text: list[int], num: int) -> None:
    found = looked_through(text).next_tokens(num)
    runs = [run for run in (6, 3) if run <= len(text)]
    all_places = (
        [place for place in range(run, len(text)) if text[place - run : place] == text[-run:]]
        for run in runs
    )
    last_places = [places[-1] for places in all_places if places]
    wanted = [[text[place:][index % len(text[place:])] for index in range(num)] for place in last_places]
    assert found in [*wanted, []], "what stands where a run stood may hide it, and nothing more"
    assert wanted or not found


def test_nearly_all_runs_are_found_in_a_long_text_that_takes_few_bytes() -> None:
    rng, num = random.Random(1), 16_384
    text = [rng.randrange(50_000) for _ in range(num)]
    lookup = Lookup(token_ids(text), num)
    lookup.note(num)
    assert lookup._behind.itemsize * len(lookup._behind) <= 32 * num
    places = [rng.randrange(6, num - 1) for _ in range(500)]
    found = 0
    for place in places:
        lookup.token_ids = token_ids([*text[: num - 6], *text[place - 6 : place]])
        found += lookup.next_tokens(1) == [text[place]]
    assert found > 0.9 * len(places)


def test_a_long_text_is_looked_through_a_part_at_a_time() -> None:
    lookup = Lookup(token_ids([*range(1000), 5, 6, 7]), 1100)
    lookup.note(256)
    assert lookup._num_noted == 3 + 256
    assert lookup.next_tokens(2) == [8, 9], "what is known already serves"
    for _ in range(4):
        lookup.note(256)
    assert lookup._num_noted == 1003
    lookup.token_ids.append(8)
    lookup.note(256)
    assert lookup._num_noted == 1004
    assert lookup._find(token_ids([5, 6, 7])) == 1003, "the run is known anew"


def test_good_guesses_become_more_and_wrong_ones_wait_ever_longer() -> None:
    guesser = Guesser(looked_through([1, 2, 3] * 30))
    assert len(guesser.guess(16)) == 2
    guesser.judge(2, 2)
    assert len(guesser.guess(16)) == 4
    guesser.judge(4, 4)
    assert len(guesser.guess(16)) == 8
    assert len(guesser.guess(5)) == 5
    guesser.judge(5, 2)
    assert len(guesser.guess(16)) == 3
    waits = []
    for _ in range(9):
        guesser.judge(3, 0)
        waits.append(next(steps for steps in range(100) if guesser.guess(16)))
    assert waits == [1, 2, 4, 8, 16, 32, 64, 64, 64]
    guesser.judge(1, 1)
    assert len(guesser.guess(16)) == 2, "one that was right ends the waiting"


def test_a_step_has_room_for_few_rows() -> None:
    repeating = [1, 2, 3, 1, 2, 3, 1, 2]
    alone, two = [sequence(list(repeating))], [sequence(list(repeating)) for _ in range(2)]
    plan = guesses()
    plan.plan(alone)
    assert [len(s.guesses) for s in alone] == [2]
    for _ in range(3):
        for each in (*alone, *two):
            if each.guesser is not None:
                each.guesser.judge(4, 4)
        plan.plan(alone)
        plan.plan(two)
    assert [len(s.guesses) for s in alone] == [5]
    assert sum(1 + len(s.guesses) for s in two) == 6
    assert all(s.guesses for s in two)
    full = [sequence(list(repeating)) for _ in range(6)]
    plan.plan(full)
    assert not any(s.guesses for s in full)


def test_there_are_none_beside_a_prompt_and_none_are_left_of_an_earlier_step() -> None:
    generates = sequence([1, 2, 3] * 3)
    plan = guesses()
    plan.plan([generates])
    assert generates.guesses
    prompt = sequence([1, 2, 3] * 3, num_prompt=9)
    prompt.num_computed = 3
    plan.plan([generates, prompt])
    assert generates.guesses == ()


@pytest.mark.parametrize(
    ("text", "params", "num"),
    [
        ([1, 2, 3] * 3, {}, 2),
        ([1, 2, 3] * 3, {"max_tokens": 3}, 1),  # one is there, one comes in any case
        ([1, 2, 3] * 3, {"max_tokens": 2}, 0),
        ([0, *[1, 2, 3] * 5], {}, 0),  # the newest token fills its page
        ([*[1, 2, 3] * 5], {}, 1),
        ([9] * 47 + [1, 2, 3] * 5, {}, 1),  # two would fill the context
        ([99, 1, 2, 3, 7, 99, 1, 2, 3], {}, 1),  # 7, then an end
        ([1, 2, 3, 7, 5, 1, 2, 3], {"stop_token_ids": (7,)}, 0),
    ],
)
def test_guesses_stay_within_page_output_and_context_and_are_no_ends(
    text: list[int], params: dict[str, object], num: int
) -> None:
    of_it = sequence(text, num_prompt=len(text) - 1, **params)
    guesses().plan([of_it])
    assert len(of_it.guesses) == num
