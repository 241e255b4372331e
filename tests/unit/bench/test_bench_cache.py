"""The replay of a trace on the page index, against ratios counted by hand, and the command."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem import cli
from tandem.bench.cache_replay import CacheReplay, CacheSpec, replay
from tandem.bench.load.block_names import BlockNames
from tandem.bench.load.trace_entry import TraceEntry
from tandem.bench.load.traces import load_trace
from tandem.bench.report import cache_table, json_file

BLOCK = 16


def entry(*block_ids: int, at_s: float = 0.0) -> TraceEntry:
    return TraceEntry(len(block_ids) * BLOCK, 1, at_s, block_ids, BLOCK)


def written(tmp_path: Path, prompts: Sequence[Sequence[int]], gap_ms: int = 1000) -> Path:
    rows = [
        {"timestamp": n * gap_ms, "input_length": 512 * len(ids), "output_length": 1, "hash_ids": list(ids)}
        for n, ids in enumerate(prompts)
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


def test_an_endless_cache_holds_what_was_seen_before() -> None:
    found = replay(CacheSpec(), [entry(1, 2, 3), entry(1, 2, 4), entry(9, 2), entry(1, 2, 3, 5)])
    assert (found.num_blocks, found.num_held_blocks, found.num_seen_blocks) == (12, 5, 5)
    assert found.num_distinct_blocks == 7  # 2 behind 9 is not 2 behind 1
    assert found.hit_ratio == pytest.approx(5 / 12)
    assert found.num_held_tokens == 5 * BLOCK


def test_a_prompt_is_held_no_longer_than_it_is() -> None:
    part = TraceEntry(BLOCK + 3, 1, 0.0, (1, 2), BLOCK)
    found = replay(CacheSpec(), [part, part])
    assert (found.num_held_blocks, found.num_held_tokens) == (2, BLOCK + 3)


def test_the_block_used_last_stays_and_a_beginning_outlives_what_follows() -> None:
    spec = CacheSpec(num_blocks=3)
    # 1 2 | 3 → 1 2 3 | 1 2 again → 4 makes 3 go, not 1 or 2 | then 5 makes 2 go before 1
    found = replay(spec, [entry(1, 2), entry(3), entry(1, 2), entry(4), entry(3)])
    assert (found.num_held_blocks, found.num_given_up) == (2, 2)
    again = replay(spec, [entry(1, 2), entry(4), entry(5), entry(1, 2)])
    assert again.num_held_blocks == 1


def test_a_prompt_longer_than_the_cache_keeps_its_beginning() -> None:
    found = replay(CacheSpec(num_blocks=2), [entry(1, 2, 3, 4), entry(1, 2, 3, 4)])
    assert found.num_held_blocks == 2


def test_prompts_go_to_who_holds_them_and_not_into_a_long_queue() -> None:
    spec = CacheSpec(num_workers=2, tokens_per_s=BLOCK)  # a block a second
    world = CacheReplay(spec)
    first = world.take(entry(1, 2, 3, 4))
    assert world.take(entry(1, 2, 3, 4, 5, at_s=100.0)) == first
    assert world.take(entry(7, at_s=200.0)) != world.take(entry(8, at_s=200.0))
    late = CacheReplay(spec)
    busy = late.take(entry(1, *range(100, 120)))  # 21 seconds
    assert late.take(entry(1, 9, at_s=1.0)) != busy


def test_by_load_alone_nobody_asks_who_holds_what() -> None:
    prompts = [entry(1, 2), entry(8, 9), entry(8, 9, at_s=50.0), entry(1, 2, at_s=50.0)]
    by_held = replay(CacheSpec(num_workers=2, tokens_per_s=BLOCK), prompts)
    by_load = replay(CacheSpec(num_workers=2, tokens_per_s=BLOCK, finds_prefixes=False), prompts)
    assert (by_held.num_held_blocks, by_load.num_held_blocks) == (4, 0)
    assert by_held.num_seen_blocks == by_load.num_seen_blocks == 4


@pytest.mark.long
@given(
    prompts=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=5), min_size=1, max_size=12),
    num_workers=st.integers(1, 3),
    num_blocks=st.none() | st.integers(1, 6),
)
def test_no_placement_holds_more_than_the_trace_has(
    prompts: list[list[int]], num_workers: int, num_blocks: int | None
) -> None:
    entries = [entry(*ids, at_s=float(n)) for n, ids in enumerate(prompts)]
    found = replay(CacheSpec(num_workers, num_blocks, tokens_per_s=20.0), entries)
    beginnings = {tuple(ids[: n + 1]) for ids in prompts for n in range(len(ids))}
    assert found.num_distinct_blocks == len(beginnings)
    assert found.num_seen_blocks == sum(map(len, prompts)) - len(beginnings)
    assert found.num_held_blocks <= found.num_seen_blocks
    if num_workers == 1 and num_blocks is None:
        assert found.num_held_blocks == found.num_seen_blocks
    assert sum(worker.num_requests for worker in found.workers) == len(prompts)
    assert sum(worker.num_computed_tokens for worker in found.workers) == found.num_tokens - found.num_held_tokens


def test_equal_ids_behind_other_beginnings_stay_apart() -> None:
    names = BlockNames()
    assert names.keys([1, 2]) == ([0, 1], 0)
    assert names.keys([3, 2]) == ([2, 3], 0)
    assert names.keys([1, 2, 2]) == ([0, 1, 4], 2)


def test_the_command_tells_both_placements(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, json_path = written(tmp_path, [(1, 2), (1, 2), (1, 3), (1, 2)]), tmp_path / "cache.json"
    given = ("--workers", "2", "--pages", "8", "--limit", "3", "--json", str(json_path))
    assert cli.main(["bench", "cache", str(path), *given]) == 0
    said = capsys.readouterr().out
    assert "0.5000 of all blocks" in said
    assert "placed by what is held" in said
    assert "by load alone" in said
    content = json_file.read_format(json_path, cache_table.FORMAT, "`tandem bench cache`")
    assert content["options"]["file"] == "trace.jsonl"
    by_held, by_load = content["replays"]
    assert (by_held["spec"]["finds_prefixes"], by_load["spec"]["finds_prefixes"]) == (True, False)
    assert by_held["figures"]["hit_ratio"] == 0.5
    assert by_held["figures"]["queued_s"].keys() == {"p50", "p90", "p99"}


def test_a_trace_that_names_no_blocks_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "azure.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,374,44\n")
    assert cli.main(["bench", "cache", str(path)]) == 1
    assert "does not say what prompts share" in capsys.readouterr().err
    assert cli.main(["bench", "cache", str(tmp_path / "none")]) == 1
    assert "cannot read the trace" in capsys.readouterr().err


MOONCAKE = Path(__file__).parents[3].parent / "shared/data/mooncake/conversation_trace.jsonl"
of_mooncake = pytest.mark.skipif(not MOONCAKE.exists(), reason="Mooncake's trace is not at ../shared/data/mooncake")


def own_ratio(path: Path, num: int | None) -> float:
    """Of its first `num` requests the share of blocks that were in a prompt before, by their ids alone."""
    seen, num_blocks = set[int](), 0
    with path.open() as lines:
        for line in islice(lines, num):
            ids = json.loads(line)["hash_ids"]
            seen.update(ids)
            num_blocks += len(ids)
    return 1 - len(seen) / num_blocks


@of_mooncake
@pytest.mark.parametrize(
    ("num", "ratio"), [(1000, 0.2121), pytest.param(None, 0.3664, marks=pytest.mark.faults)], ids=["1,000", "all"]
)
def test_the_index_finds_as_much_of_mooncakes_trace_as_the_trace_has(num: int | None, ratio: float) -> None:
    found = replay(CacheSpec(), load_trace(MOONCAKE, limit=num))
    assert found.hit_ratio == pytest.approx(ratio, rel=0.005)
    assert found.hit_ratio == pytest.approx(own_ratio(MOONCAKE, num), rel=0.005)
