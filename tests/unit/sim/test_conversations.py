"""Conversations of a simulation: when their turns come, what they begin with, and what of that is found."""

from __future__ import annotations

import dataclasses
import json
from itertools import pairwise
from pathlib import Path

import pytest

from tandem.cli import main
from tandem.core.errors import ConfigError
from tandem.sim.conversations import ConversationPlan, closed, drawn_conversations
from tandem.sim.faults import Death, FaultShape
from tandem.sim.load import Arrival, Following, Lengths
from tandem.sim.prefixes import PageNames
from tandem.sim.scenario import read_scenario
from tandem.sim.shape import PoolShape
from tandem.sim.world import World
from tests.unit.sim.test_prefixes import BLOCK, KEEPS, asked
from tests.unit.sim.test_world import LATENCY_S, LIMITS, MESSAGE_S, PAGE, SHAPE, STEP_S, TOKEN_BYTES, TOKEN_S


def talk(*turns: tuple[int, int], think_s: float = 1.0, at_s: float = 5.0, first: int = 0) -> Arrival:
    """A conversation, by the lengths of each turn's prompt and answer."""
    made = [Arrival(first + n, 0.0, *one, conversation=first, turn=n + 1) for n, one in enumerate(turns)]
    found = made[-1]
    for before in reversed(made[:-1]):
        found = dataclasses.replace(before, then=Following(found, think_s))
    return dataclasses.replace(found, arrived_s=at_s)


def test_a_turn_comes_when_the_one_before_is_answered_and_its_user_has_thought() -> None:
    outcomes = World(SHAPE).run([talk((100, 11), (128, 3), (150, 2)), Arrival(3, 5.0, 10, 2)])
    assert [one.arrival.number for one in outcomes] == [0, 3, 1, 2], "those that follow are the last ones"
    first, _, second, third = outcomes
    assert second.arrival.arrived_s == first.last_token_s + 1.0
    assert third.arrival.arrived_s == second.last_token_s + 1.0
    assert [one.num_tokens for one in outcomes] == [11, 2, 3, 2]


def test_a_recorded_turn_comes_at_its_time_or_when_the_one_before_is_answered() -> None:
    early, late = Following(Arrival(1, 9.0, 200, 2), gap_s=0.01), Following(Arrival(1, 9.0, 200, 2), gap_s=4.0)
    first, second = World(SHAPE).run([Arrival(0, 5.0, 100, 11, then=early)])
    assert second.arrival.arrived_s == first.last_token_s
    first, second = World(SHAPE).run([Arrival(0, 5.0, 100, 11, then=late)])
    assert second.arrival.arrived_s == pytest.approx(9.0)


def test_a_turn_finds_what_was_said_and_answered_before() -> None:
    """Prefill has the prompt, and decode, which generated it, also the answer; of 100 and 29 tokens, the last of which
    was never computed, 8 full pages."""
    first, second = World(KEEPS).run([talk((100, 29), (160, 3))])
    assert (first.num_cached, second.num_cached) == (0, 96)
    assert second.ttft_s == pytest.approx(MESSAGE_S + STEP_S + 64 * TOKEN_S)
    sent_s = (160 - 8 * PAGE) * TOKEN_BYTES / 1e9 + LATENCY_S
    assert second.longest_gap_s == pytest.approx(sent_s + STEP_S + TOKEN_S)
    first, second = World(KEEPS).run([Arrival(0, 5.0, 100, 29, then=Following(Arrival(1, 0.0, 160, 3)))])
    assert second.num_cached == 0, "what follows without being a turn begins like no other"


def test_conversations_share_what_all_begin_with_and_nothing_else() -> None:
    names, common = PageNames(PAGE), 40
    one, next_turn, other = (
        names.keys(Arrival(number, 0.0, num, 5, conversation=conversation, num_common=common))
        for number, num, conversation in ((0, 100, 0), (1, 150, 0), (2, 150, 2))
    )
    assert len(one) == 6
    assert next_turn[:6] == one
    assert other[:2] == one[:2]
    assert not set(other[2:]) & {*one, *next_turn}


def test_a_turn_that_fails_ends_its_conversation() -> None:
    faults = FaultShape((Death("decode-0", 5.05), Death("decode-1", 35.0)), wait_for_worker_s=1.0)
    world = World(dataclasses.replace(SHAPE, faults=faults, start_s=20.0))
    outcomes = world.run([talk((100, 50), (160, 2), (200, 2)), talk((100, 50), (160, 2), at_s=30.0, first=3)])
    assert [one.error for one in outcomes] == ["no_worker", "", ""]
    assert world.num_unsent == 2
    assert world.figures.num_open == 0


@pytest.mark.parametrize("names", [True, False])
def test_the_router_gives_turns_by_sessions_where_requests_name_them(names: bool) -> None:
    """A turn whose conversation has got an answer already waits together with a request that comes later, and is no
    turn; others keep decode busy."""
    limits = dataclasses.replace(LIMITS, max_num_seqs=1)
    shape = dataclasses.replace(SHAPE, names_sessions=names, decode=PoolShape(1, 200, limits))
    others = [Arrival(number, 5.01, 100, 200) for number in range(2, 10)]
    outcomes = World(shape).run([talk((100, 10), (120, 10), think_s=0.0), *others, Arrival(10, 6.0, 100, 2)])
    *_, alone, second = outcomes
    assert (alone.arrival.number, second.arrival.turn) == (10, 2)
    assert second.arrival.arrived_s < 6.0
    assert (alone.first_token_s < second.first_token_s) is names


# --- drawn


def test_each_turn_is_all_that_was_said_and_a_new_text() -> None:
    plan = ConversationPlan(
        20, Lengths(5, 0.5), Lengths(50, 0.5), Lengths(20, 0.5), think_s=2.0, rate=0.5, num_common=30, most_tokens=400
    )
    firsts = drawn_conversations(plan, seed=3)
    assert len(firsts) == 20
    assert firsts == drawn_conversations(plan, seed=3)
    assert all(a.arrived_s < b.arrived_s for a, b in pairwise(firsts))
    turns = [turn for first in firsts for turn in first.turns()]
    assert [turn.number for turn in turns] == list(range(len(turns)))
    for first in firsts:
        own = list(first.turns())
        assert {turn.conversation for turn in own} == {first.number}
        assert [turn.turn for turn in own] == list(range(1, len(own) + 1))
        assert own[0].num_input > 30
        assert all(b.num_input > a.num_input + a.num_output for a, b in pairwise(own))
        assert all(turn.num_input + turn.num_output <= 400 for turn in own[1:])
    assert len({len(list(first.turns())) for first in firsts}) > 3
    pauses = [turn.then.think_s for turn in turns if turn.then is not None]
    assert sum(pauses) / len(pauses) == pytest.approx(2.0, rel=0.5)


def test_users_hold_one_conversation_after_the_other() -> None:
    plan = ConversationPlan(5, Lengths(2), Lengths(50), Lengths(20), think_s=3.0, concurrency=2)
    firsts = drawn_conversations(plan, seed=1)
    held = [[turn.conversation for turn in first.turns()] for first in firsts]
    assert held == [[0, 0, 4, 4, 8, 8], [2, 2, 6, 6]]
    assert [first.arrived_s for first in firsts] == [0.0, 0.0]
    first = firsts[0]
    (thinks, goes_on, *_) = [turn.then.think_s for turn in first.turns() if turn.then is not None]
    assert thinks > 0
    assert goes_on == 0, "a new conversation begins at once, as in tandem bench"
    few = dataclasses.replace(plan, concurrency=9)
    assert len(drawn_conversations(few, seed=1)) == 5


# --- of a trace


def test_turns_of_a_trace_are_found_by_what_prompts_begin_with() -> None:
    """Blocks of 32 tokens; 7 is what all begin with."""
    arrivals = [
        asked(0, 0.0, 100, 40, 7, 1, 2, 90),
        asked(1, 1.0, 100, 20, 7, 5, 6, 91),  # another conversation
        asked(2, 2.0, 130, 10, 7, 1, 2, 95, 96),  # begins like the first one, and is too short to hold its answer
        asked(3, 4.0, 150, 10, 7, 1, 2, 3, 92),  # goes on from the first one
        asked(4, 9.0, 200, 10, 7, 1, 2, 3, 4, 8, 94),  # goes on from that
    ]
    first, other, short = closed(arrivals)
    assert [turn.number for turn in first.turns()] == [0, 3, 4]
    assert [(turn.conversation, turn.turn) for turn in first.turns()] == [(0, 1), (0, 2), (0, 3)]
    assert [turn.then.gap_s for turn in first.turns() if turn.then is not None] == [4.0, 5.0]
    assert (other.number, other.then, short.number, short.then) == (1, None, 2, None)
    second, third = list(first.turns())[1:]
    # The answer is called as the next turn has it, and what was a part of a block as it is called when that is full.
    assert first.block_ids == (7, 1, 2, 3, 4)
    assert second.block_ids == (7, 1, 2, 3, 4)
    assert third.block_ids == (7, 1, 2, 3, 4, 8, 94)
    names = PageNames(PAGE)
    keys = [names.keys(each) for each in (first, second, third)]
    assert keys[0] == keys[2][: 140 // PAGE]
    assert keys[1] == keys[2][: 160 // PAGE]
    assert not set(names.keys(other)[2:]) & set(keys[2])


def test_what_many_prompts_have_in_common_is_no_history() -> None:
    shared = [asked(number, float(number), 40 + 20 * number, 1, 7, *range(100 * number, 100 * number + number + 1))
              for number in range(12)]  # fmt: skip
    assert [one.then for one in closed(shared)] == [None] * 12


def test_names_of_parts_of_blocks_lead_to_the_full_one() -> None:
    """Three turns end in the same block, and somebody asks the first one again."""
    arrivals = [
        asked(0, 0.0, 70, 2, 1, 2, 90),
        asked(1, 1.0, 80, 2, 1, 2, 91),
        asked(2, 2.0, 100, 2, 1, 2, 3, 92),
        asked(3, 3.0, 70, 2, 1, 2, 90),
    ]
    first, again = closed(arrivals)
    assert [turn.block_ids for turn in first.turns()] == [(1, 2, 3), (1, 2, 3), (1, 2, 3, 92)]
    assert again.block_ids == (1, 2, 3)
    names = PageNames(PAGE)
    keys, others = names.keys(first), names.keys(dataclasses.replace(again, num_output=30))
    assert others[:4] == keys[:4]
    assert not set(others[4:]) & set(names.keys(list(first.turns())[-1])), "its answer is another one"


def test_a_closed_trace_is_found_again_where_its_answers_were_generated() -> None:
    shape = dataclasses.replace(
        KEEPS, decode=PoolShape(1, 200, dataclasses.replace(LIMITS, computes_prompts=True)), mixed_pool_tokens=1000
    )
    arrivals = [asked(0, 0.0, 2 * BLOCK, 2 * BLOCK + 1, 1, 2), asked(1, 50.0, 5 * BLOCK, 2, 1, 2, 3, 4, 5)]
    assert [one.num_cached for one in World(shape).run(arrivals)] == [0, 2 * BLOCK]
    assert [one.num_cached for one in World(shape).run(closed(arrivals))] == [0, 4 * BLOCK]


# --- the file


def test_a_file_says_how_conversations_are_held(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "talks.yaml").write_text(
        "load: {conversations: 12, turns: 3, think_time_s: 2, concurrency: 4, common_tokens: 64, input_median: 40,\n"
        "       output_median: 8, input_spread: 0, output_spread: 0}\n"
        "tenants: [{name: one}, {name: other}]\n"
    )
    assert main(["sim", "run", str(tmp_path / "talks.yaml"), "--json", str(tmp_path / "found.json")]) == 0
    found = json.loads((tmp_path / "found.json").read_text())
    turns = found["runs"][0]["figures"]["turns"]
    assert [turn["turn"] for turn in turns] == [1, 2, 3]
    assert [turn["num"] for turn in turns] == [12] * 3
    assert [turn["mean_input_tokens"] for turn in turns] == [104, 152, 200]
    assert turns[0]["cache"]["num_repeated_tokens"] == 0
    last = turns[2]["cache"]
    assert last["num_repeated_tokens"] == 12 * 160
    assert 0.5 * 12 * 160 < last["num_cached_tokens"] <= 12 * 160
    of_tenant = {one["conversation"]: one["tenant"] for one in found["requests"]}
    assert all(one["tenant"] == of_tenant[one["conversation"]] for one in found["requests"])
    assert "turn  answers" in " ".join(capsys.readouterr().out.split("\n"))


def test_a_trace_is_closed_where_the_file_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        {"timestamp": 0, "input_length": 1000, "output_length": 300, "hash_ids": [1, 2]},
        {"timestamp": 10, "input_length": 2000, "output_length": 3, "hash_ids": [1, 3, 4, 5]},
    ]
    (tmp_path / "trace.jsonl").write_text("\n".join(map(json.dumps, rows)))
    for is_closed in (False, True):
        (tmp_path / "talk.yaml").write_text(f"load: {{trace: trace.jsonl, closed: {str(is_closed).lower()}}}")
        assert main(["sim", "run", str(tmp_path / "talk.yaml"), "--json", str(tmp_path / "found.json")]) == 0
        first, second = json.loads((tmp_path / "found.json").read_text())["requests"]
        assert (second["arrived_s"] == first["last_token_s"]) is is_closed
        assert (second["arrived_s"] == 0.01) is not is_closed


@pytest.mark.parametrize(
    ("load", "key"),
    [
        ("trace: a.jsonl, conversations: 3", "load.conversations"),
        ("closed: true", "load.closed"),
        ("concurrency: 3", "load.concurrency"),
    ],
)
def test_what_would_do_nothing_is_refused(load: str, key: str, tmp_path: Path) -> None:
    (tmp_path / "talk.yaml").write_text(f"load: {{{load}}}")
    with pytest.raises(ConfigError) as refused:
        read_scenario(tmp_path / "talk.yaml")
    assert refused.value.key == key
