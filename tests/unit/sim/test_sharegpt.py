"""ShareGPT's conversations as the load of a scenario."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tandem.bench.load.sharegpt import by_tokenizer
from tandem.bench.load.traces import load_trace
from tandem.core.errors import ConfigError
from tandem.core.tokenizer import Tokenizer
from tandem.sim.load import Arrival
from tandem.sim.scenario import arrivals, read_scenario
from tandem.sim.world import World

TINY = Path(__file__).parents[3] / "tandem" / "models" / "tiny"


def talk(*texts: str) -> dict[str, Any]:
    """Humans and models say these in turn."""
    said = [{"from": "gpt" if number % 2 else "human", "value": text} for number, text in enumerate(texts)]
    return {"id": texts[0][:3], "conversations": said}


TALKS = [
    talk("a" * 400, "b" * 40, "c" * 80, "d" * 20),
    talk("only a question"),
    talk("e" * 800, "f" * 4),
    {"id": "empty", "conversations": []},
]


def load_of(directory: Path, keys: str, told: Any = TALKS) -> list[Arrival]:
    (directory / "talks.json").write_text(json.dumps(told))
    (directory / "scenario.yaml").write_text(f"load: {{trace: talks.json, {keys}}}\n")
    return arrivals(read_scenario(directory / "scenario.yaml"), directory)


def test_first_questions_come_at_a_rate_and_are_counted_by_characters(tmp_path: Path) -> None:
    found = load_of(tmp_path, "characters_per_token: 4, rate: 5")
    assert [(one.num_input, one.num_output) for one in found] == [(100, 10), (200, 1)]
    assert [one.arrived_s for one in found] == sorted(one.arrived_s for one in found)
    (twice,) = {round(one.arrived_s / other.arrived_s, 6) for one, other in zip(
        found[1:], load_of(tmp_path, "characters_per_token: 4, rate: 10")[1:], strict=True
    )}  # fmt: skip
    assert twice == 2.0
    assert len(load_of(tmp_path, "characters_per_token: 4, limit: 1")) == 1


def test_a_checkpoint_s_tokenizer_counts_as_tandem_bench_does(tmp_path: Path) -> None:
    told = [talk("Once upon a time there was a cat.", "It slept.")]
    (one,) = load_of(tmp_path, f"tokenizer: {TINY}", told)
    (entry,) = load_trace(tmp_path / "talks.json", tokenizer=Tokenizer.from_dir(TINY))
    assert (one.num_input, one.num_output) == (entry.num_input, entry.num_output)
    (held,) = load_of(tmp_path, f"tokenizer: {TINY}, closed: true", told)
    count = by_tokenizer(Tokenizer.from_dir(TINY))
    assert (held.num_input, held.num_output) == (count("Once upon a time there was a cat."), entry.num_output)


def test_whole_conversations_are_held_where_turns_wait_for_answers(tmp_path: Path) -> None:
    keys = "characters_per_token: 4, closed: true, think_time_s: 1, rate: 2"
    first, other = load_of(tmp_path, keys)
    assert [(one.num_input, one.num_output, one.turn) for one in first.turns()] == [(100, 10, 1), (130, 5, 2)]
    assert [(one.num_input, one.num_output, one.turn) for one in other.turns()] == [(200, 1, 1)]
    assert {one.conversation for one in first.turns()} == {first.number} != {other.number}
    scenario = read_scenario(tmp_path / "scenario.yaml")
    outcomes = {one.arrival.number: one for one in World(scenario.shape([first, other])).run([first, other])}
    assert all(one.is_over for one in outcomes.values())
    assert outcomes[1].arrival.arrived_s > outcomes[0].last_token_s, "its user has thought"
    assert outcomes[1].num_cached == 96, "three pages of what was said before"


def test_users_hold_recorded_conversations_one_after_the_other(tmp_path: Path) -> None:
    (user,) = load_of(tmp_path, "characters_per_token: 4, closed: true, concurrency: 1")
    assert [one.num_input for one in user.turns()] == [100, 130, 200]
    assert user.arrived_s == 0.0


def test_turns_that_no_worker_has_room_for_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "talks.json").write_text(json.dumps(TALKS[:1]))
    (tmp_path / "scenario.yaml").write_text(
        "load: {trace: talks.json, characters_per_token: 4, closed: true}\ndecode: {tokens: 128}\n"
    )
    (first,) = arrivals(read_scenario(tmp_path / "scenario.yaml"), tmp_path)
    assert [one.num_input for one in first.turns()] == [100]


@pytest.mark.parametrize(
    ("keys", "told", "named"),
    [
        ("rate: 3", TALKS, "talks.json holds texts; name the checkpoint .* load.tokenizer, or .* load.characters_per_"),
        ("tokenizer: a, characters_per_token: 4", TALKS, "one of both counts texts"),
        ("characters_per_token: 4", ["hello"], 'conversation 1: it must be an object .*, not "hello"'),
        (
            "characters_per_token: 4",
            [TALKS[0], {"conversations": [{"from": "human", "text": "x"}]}],
            r'conversation 2: it must hold {"from": "human", "value": "a text"}, not {"from": "human", "text": "x"}',
        ),
        ("characters_per_token: 4", [{"conversations": "hello"}], "`conversations` must be a list of what was said"),
        ("characters_per_token: 4", [talk("only asked")], "talks.json holds no request"),
        ("characters_per_token: 4, closed: true", [talk("only asked")], "holds no conversation with an answer"),
        ("characters_per_token: 4, closed: true, copies: 2", TALKS, "then and copies are of requests that come at"),
    ],
)
def test_what_is_wrong_in_a_load_of_texts_is_named(tmp_path: Path, keys: str, told: Any, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        load_of(tmp_path, keys, told)


def test_what_counts_texts_is_refused_where_there_are_none(tmp_path: Path) -> None:
    (tmp_path / "talks.json").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,374,44\n")
    for keys, said in (
        ("characters_per_token: 4", "load.characters_per_token counts texts, and talks.json has none, but lengths"),
        ("concurrency: 3, closed: true", "this trace has its own times"),
    ):
        (tmp_path / "scenario.yaml").write_text(f"load: {{trace: talks.json, {keys}}}\n")
        with pytest.raises(ConfigError, match=re.escape(said)):
            arrivals(read_scenario(tmp_path / "scenario.yaml"), tmp_path)
