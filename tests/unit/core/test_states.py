"""The states of a request: each pair is legal or illegal as the table says, and the stamps add up."""

from __future__ import annotations

import itertools

import pytest

from tandem.core.errors import IllegalTransitionError
from tandem.core.states import LEGAL, RequestLife, RequestState

# Written out a second time on purpose, as the design words it, so that a slip in the table shows.
_ALLOWED = """
    queued → prefilling      prefilling → handoff    handoff → decoding      decoding → finished
    prefilling → finished
    prefilling → queued      handoff → queued        decoding → queued
    decoding → handoff
    queued → cancelled       prefilling → cancelled  handoff → cancelled     decoding → cancelled
    queued → failed          prefilling → failed     handoff → failed        decoding → failed
"""
_WORDS = _ALLOWED.replace("→", " ").split()
ALLOWED = {(RequestState(a), RequestState(b)) for a, b in zip(_WORDS[::2], _WORDS[1::2], strict=True)}

# The shortest way from the start to each state.
WAYS = {
    RequestState.QUEUED: [],
    RequestState.PREFILLING: [RequestState.PREFILLING],
    RequestState.HANDOFF: [RequestState.PREFILLING, RequestState.HANDOFF],
    RequestState.DECODING: [RequestState.PREFILLING, RequestState.HANDOFF, RequestState.DECODING],
    RequestState.FINISHED: [RequestState.PREFILLING, RequestState.FINISHED],
    RequestState.CANCELLED: [RequestState.CANCELLED],
    RequestState.FAILED: [RequestState.FAILED],
}


def life_in(state: RequestState) -> RequestLife:
    life = RequestLife("r1", created_s=0.0)
    for step in WAYS[state]:
        life.to(step, now_s=1.0)
    return life


@pytest.mark.parametrize(
    ("before", "after"), list(itertools.product(RequestState, RequestState)), ids=lambda state: state.value
)
def test_every_pair_of_states(before: RequestState, after: RequestState) -> None:
    life = life_in(before)
    num_stamps = len(life.stamps)
    if (before, after) in ALLOWED:
        life.to(after, now_s=2.0)
        assert life.state is after
        assert life.stamps[-1] == (2.0, after)
        return
    with pytest.raises(IllegalTransitionError) as caught:
        life.to(after, now_s=2.0)
    assert caught.value.request_id == "r1"
    assert " → ".join(state.value for _, state in life.stamps) in caught.value.message
    assert (life.state, len(life.stamps)) == (before, num_stamps), "a refused transition leaves no trace"


def test_table_names_every_state() -> None:
    assert LEGAL.keys() == set(RequestState)


def test_live_states_are_those_with_a_way_on() -> None:
    ended = {RequestState.FINISHED, RequestState.CANCELLED, RequestState.FAILED}
    assert {state for state in RequestState if not LEGAL[state]} == ended


def test_parts_of_a_latency_add_up_over_a_retry() -> None:
    life = RequestLife("r1", created_s=10.0)
    way = [
        (RequestState.PREFILLING, 11.0),
        (RequestState.HANDOFF, 14.0),
        (RequestState.QUEUED, 14.5),
        (RequestState.PREFILLING, 15.0),
        (RequestState.HANDOFF, 17.0),
        (RequestState.DECODING, 17.25),
        (RequestState.FINISHED, 20.0),
    ]
    for state, now_s in way:
        life.to(state, now_s)
    parts = {state: life.seconds_in(state) for state in RequestState}
    assert parts[RequestState.QUEUED] == 1.0 + 0.5
    assert parts[RequestState.PREFILLING] == 3.0 + 2.0
    assert parts[RequestState.HANDOFF] == 0.5 + 0.25
    assert parts[RequestState.DECODING] == 2.75
    assert sum(parts.values()) == life.stamps[-1][0] - life.created_s


def test_a_state_that_has_not_ended_counts_nothing_yet() -> None:
    life = life_in(RequestState.PREFILLING)
    assert life.seconds_in(RequestState.PREFILLING) == 0.0
