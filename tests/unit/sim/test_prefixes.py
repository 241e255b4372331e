"""Prompts of a simulation that begin alike: what is found, where, and for how long."""

from __future__ import annotations

import dataclasses
import json
import random
from itertools import count
from pathlib import Path

import pytest

from tandem.bench.load.block_names import BlockNames
from tandem.cli import main
from tandem.core.identity import Role
from tandem.sim.load import Arrival
from tandem.sim.outcome import Outcome
from tandem.sim.prefixes import PageNames
from tandem.sim.shape import PoolShape, WorldShape
from tandem.sim.world import World
from tests.unit.sim.test_world import LATENCY_S, LIMITS, MESSAGE_S, PAGE, SHAPE, STEP_S, TOKEN_BYTES, TOKEN_S

BLOCK = 2 * PAGE
KEEPS = dataclasses.replace(SHAPE, prefix_cache=True)


def asked(number: int, at_s: float, num_input: int, num_output: int, *blocks: int) -> Arrival:
    return Arrival(number, at_s, num_input, num_output, blocks, BLOCK)


def simulated(shape: WorldShape, arrivals: list[Arrival]) -> tuple[World, list[Outcome]]:
    """All requests ended, and what workers hold is cached."""
    world = World(shape)
    outcomes = world.run(arrivals)
    for machine in world.machines.values():
        machine.pool.check()
        counts = machine.pool.counts()
        assert counts.free + counts.cached == machine.pool.num_pages
        assert machine.is_empty
    return world, outcomes


def test_keys_are_chained_over_blocks() -> None:
    names = PageNames(PAGE)
    one = names.keys(asked(0, 0.0, 100, 1, 1, 2, 3, 4))
    assert len(one) == 6, "full pages"
    longer, other = names.keys(asked(1, 0.0, 128, 1, 1, 2, 3, 5)), names.keys(asked(2, 0.0, 128, 1, 9, 2, 3, 4))
    assert longer[:6] == one[:6]
    assert not set(longer[6:]) & set(one)
    assert not set(other) & {*one, *longer}, "equal blocks behind different ones"
    alone = [names.keys(Arrival(number, 0.0, 100, 1)) for number in (3, 4)]
    assert not set(alone[0]) & set(alone[1])
    assert len({*one, *longer, *other, *alone[0], *alone[1]}) == 6 + 2 + 8 + 12


def test_what_a_scaled_prompt_has_beyond_its_blocks_is_like_no_other() -> None:
    names = PageNames(PAGE)
    one, other = (names.keys(asked(number, 0.0, BLOCK + 3 * PAGE, 1, 7)) for number in (0, 1))
    assert len(one) == len(other) == 5
    assert one[:2] == other[:2], "its named block"
    assert not set(one[2:]) & set(other[2:])


def test_of_a_prompt_that_begins_like_an_earlier_one_the_rest_is_computed_and_sent() -> None:
    first, second = asked(0, 0.0, 100, 3, 1, 2, 3, 4), asked(1, 5.0, 128, 3, 1, 2, 3, 5)
    world, (_, one) = simulated(KEEPS, [first, second])
    assert one.num_cached == 96
    assert one.first_token_s - 5.0 == pytest.approx(MESSAGE_S + STEP_S + 32 * TOKEN_S)
    # Decode holds these 96 tokens too.
    sent_s = 32 * TOKEN_BYTES / 1e9 + LATENCY_S
    assert one.longest_gap_s == pytest.approx(sent_s + STEP_S + TOKEN_S)
    computed = [machine.work.num_tokens for machine in world.machines.values()]
    assert computed == [100 + 32, 2 + 2]


def test_the_oldest_pages_make_room() -> None:
    """Of prompts of eight pages each, of which the last one is computed in any case."""
    small = dataclasses.replace(KEEPS, prefill=PoolShape(1, 23, LIMITS))
    order = [1, 2, 3, 2, 1]
    arrivals = [asked(n, 5.0 * n, 128, 1, *range(10 * who, 10 * who + 4)) for n, who in enumerate(order)]
    _, outcomes = simulated(small, arrivals)
    # The third took the last page of the first one, and the second the one before it when it came again.
    assert [one.num_cached for one in outcomes] == [0, 0, 0, 112, 96]
    smaller = dataclasses.replace(KEEPS, prefill=PoolShape(1, 16, LIMITS))
    _, outcomes = simulated(smaller, arrivals)
    assert [one.num_cached for one in outcomes] == [0, 0, 0, 112, 0]


def test_requests_go_where_their_beginnings_are() -> None:
    two = dataclasses.replace(KEEPS, prefill=PoolShape(2, 200, LIMITS), decode=PoolShape(2, 200, LIMITS))
    kinds, numbers = {1: "", 2: ""}, count()
    arrivals = [asked(next(numbers), 0.0, 640, 2, *range(who * 100, who * 100 + 20)) for who in kinds]
    rng = random.Random(3)
    arrivals += [
        asked(next(numbers), 5.0 + turn, 640, 2, *range(who * 100, who * 100 + 20))
        for turn in range(20)
        for who in [rng.choice([1, 2])]
    ]
    _, outcomes = simulated(two, arrivals)
    first, second = outcomes[:2]
    assert first.prefill != second.prefill
    for one in outcomes[2:]:
        same = first if one.arrival.block_ids == first.arrival.block_ids else second
        assert (one.prefill, one.decode) == (same.prefill, same.decode)
        assert one.num_cached == 640 - PAGE


def conversations(num: int) -> list[Arrival]:
    """Prompts that go on from earlier ones; what does not fill a block is of one prompt alone."""
    rng, histories, blocks, found = random.Random(11), [[0]], count(1), list[Arrival]()
    for number in range(num):
        history = [*rng.choice(histories)[: rng.randint(1, 9)], *(next(blocks) for _ in range(rng.randint(1, 3)))]
        histories.append(history)
        num_more = rng.choice([0, 5, 20])
        ids = (*history, next(blocks)) if num_more else tuple(history)
        num_input = BLOCK * len(history) + num_more
        found.append(Arrival(number, 0.5 * number, num_input, rng.randint(1, 5), ids, BLOCK))
    return found


@pytest.mark.long
def test_an_endless_cache_finds_what_the_load_says_was_there() -> None:
    arrivals, names, expected = conversations(200), BlockNames(), []
    for one in arrivals:
        _, num_seen = names.keys(one.block_ids)
        expected.append(min(num_seen * BLOCK, (one.num_input - 1) // PAGE * PAGE))
    shape = dataclasses.replace(KEEPS, prefill=PoolShape(1, 10_000, LIMITS), decode=PoolShape(1, 10_000, LIMITS))
    world, outcomes = simulated(shape, arrivals)
    assert [one.num_cached for one in outcomes] == expected
    assert sum(expected) > 0.3 * sum(one.num_input for one in arrivals)
    computed = sum(machine.work.num_tokens for machine in world.machines.values() if machine.role is Role.PREFILL)
    assert computed == sum(one.arrival.num_input - (one.num_cached or 0) for one in outcomes)


def test_the_command_says_what_caches_held(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        {"timestamp": 4000 * n, "input_length": 1024, "output_length": 4, "hash_ids": [1, 2 + n % 2]} for n in range(8)
    ]
    (tmp_path / "trace.jsonl").write_text("\n".join(map(json.dumps, rows)))
    for keeps in (True, False):
        cache = f"{{prefix_cache: {str(keeps).lower()}, page_size: 32}}"
        (tmp_path / "scenario.yaml").write_text(f"load: {{trace: trace.jsonl}}\ntandem: {{cache: {cache}}}\n")
        line = ["sim", "run", str(tmp_path / "scenario.yaml"), "--json", str(tmp_path / "found.json")]
        assert main(line) == 0
        found = json.loads((tmp_path / "found.json").read_text())
        # The second finds the first block; the others all but their last page.
        assert found["num_cached_tokens"] == (512 + 6 * (1024 - 32) if keeps else None)
        assert ("prefix caches" in capsys.readouterr().out) is keeps
