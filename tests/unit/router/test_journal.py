"""The journal gives each index of each choice out once and in order, whatever comes in whatever order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.request.journal import Journal
from router.request.request import TokenGiven
from tandem.core.errors import InternalError


def token(index: int, token_id: int = 7, *, attempt: int = 1, choice: int = 0, end: str | None = None) -> TokenGiven:
    return TokenGiven(attempt, choice, index, token_id, end)


def test_tokens_in_order_are_given_out_at_once() -> None:
    journal = Journal(1)
    assert [t.token_id for i in range(3) for t in journal.accept(token(i, 10 + i))] == [10, 11, 12]
    assert journal.choices[0].token_ids == [10, 11, 12]


def test_decodes_token_may_come_before_prefills_first() -> None:
    journal = Journal(1)
    assert journal.accept(token(2, 12)) == []
    assert journal.accept(token(1, 11)) == []
    assert not journal.has_first_tokens
    assert [t.token_id for t in journal.accept(token(0, 10))] == [10, 11, 12]
    assert journal.has_first_tokens


def test_a_repeated_token_is_dropped_and_another_id_is_a_disagreement() -> None:
    journal = Journal(1)
    journal.accept(token(0, 10))
    assert journal.accept(token(0, 10)) == []
    assert journal.dropped == {"repeated": 1}
    assert journal.accept(token(0, 99)) == []
    assert journal.dropped == {"repeated": 2, "disagreed": 1}
    journal.accept(token(2, 12))
    journal.accept(token(2, 98))
    assert journal.dropped == {"repeated": 3, "disagreed": 2}
    assert [t.token_id for t in journal.accept(token(1, 11))] == [11, 12]


def test_a_new_attempt_forgets_what_came_early_and_keeps_what_was_given_out() -> None:
    journal = Journal(1)
    journal.accept(token(0, 10))
    journal.accept(token(5, 15))
    assert journal.next_attempt() == 2
    assert journal.accept(token(1, 11)) == []
    assert journal.dropped == {"stale": 1}
    assert [t.token_id for t in journal.accept(token(1, 21, attempt=2))] == [21]
    assert journal.choices[0].token_ids == [10, 21]
    assert not journal.choices[0].early


def test_nothing_follows_the_end_of_a_choice() -> None:
    journal = Journal(2)
    journal.accept(token(2, 12))
    journal.accept(token(1, 11, end="stop"))
    assert [t.token_id for t in journal.accept(token(0, 10))] == [10, 11]
    assert journal.choices[0].is_finished
    assert journal.accept(token(2, 12)) == []
    assert journal.dropped == {"finished": 2}
    assert not journal.is_finished
    journal.finish(1)
    assert journal.is_finished


def test_a_stop_string_cuts_the_record() -> None:
    journal = Journal(1)
    for index in range(4):
        journal.accept(token(index, index))
    journal.finish(0, 2)
    assert journal.choices[0].token_ids == [0, 1]
    assert journal.num_tokens == 2


def test_a_choice_that_nobody_asked_for_is_a_defect() -> None:
    with pytest.raises(InternalError, match="choice 3"):
        Journal(2).accept(token(0, choice=3))


@st.composite
def disorder(draw: st.DrawFn) -> tuple[list[list[int]], list[TokenGiven]]:
    """True outputs of some choices; the events of them: reordered, repeated, some wrong, some stale."""
    outputs = draw(st.lists(st.lists(st.integers(0, 50), min_size=1, max_size=8), min_size=1, max_size=3))
    events = [
        token(i, token_id, choice=c, end="length" if i + 1 == len(ids) else None)
        for c, ids in enumerate(outputs)
        for i, token_id in enumerate(ids)
    ]
    again = draw(st.lists(st.sampled_from(events), max_size=10))
    stale = [
        token(e.index, 51, attempt=2, choice=e.choice) for e in draw(st.lists(st.sampled_from(events), max_size=5))
    ]
    return outputs, draw(st.permutations(events + again + stale))


@pytest.mark.long
@given(disorder())
def test_a_client_sees_each_index_exactly_once_in_order(case: tuple[list[list[int]], list[TokenGiven]]) -> None:
    outputs, events = case
    journal = Journal(len(outputs))
    seen: dict[int, list[TokenGiven]] = {c: [] for c in range(len(outputs))}
    for event in events:
        for given_out in journal.accept(event):
            seen[given_out.choice].append(given_out)
    for choice, ids in enumerate(outputs):
        assert [t.index for t in seen[choice]] == list(range(len(ids)))
        assert [t.token_id for t in seen[choice]] == ids == journal.choices[choice].token_ids
    assert journal.is_finished
    assert journal.dropped["disagreed"] == 0
    num_dropped = sum(journal.dropped.values())
    assert num_dropped == len(events) - sum(map(len, outputs))


@pytest.mark.long
@given(st.lists(st.integers(0, 9), min_size=1, max_size=9), st.data())
def test_over_attempts_a_client_sees_one_output(output: list[int], data: st.DataObject) -> None:
    """Each attempt goes on behind the journal, sends some of the rest in any order, and fails."""
    journal, seen = Journal(1), []
    for attempt in range(1, 5):
        given_out = len(journal.choices[0].token_ids)
        rest = range(given_out, len(output))
        sent = data.draw(st.permutations(rest)) if attempt == 4 else data.draw(st.lists(st.sampled_from([*rest, 0])))
        for index in sent:
            event = token(index, output[index], attempt=attempt, end="stop" if index + 1 == len(output) else None)
            seen += journal.accept(event)
        if attempt < 4:
            journal.next_attempt()
    assert [t.token_id for t in seen] == output
    assert journal.dropped["disagreed"] == 0


def test_a_choice_that_ends_twice_has_ended_once() -> None:
    """By its last token, and by what its client's text says of that."""
    journal = Journal(2)
    journal.accept(token(0, 10, end="stop"))
    journal.finish(0, 1)
    assert not journal.is_finished
    journal.finish(1)
    assert journal.is_finished
