"""The section of conversations that were measured with prefixes found and without; and the router that finds none."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest

from benchmarks import __main__ as benchmarks_main
from benchmarks import docs
from benchmarks.conversations import blind_router, command
from benchmarks.conversations.section import section


def figures(*, cached: int, ttft_s: Sequence[float]) -> dict[str, Any]:
    return {
        "cache": {"num_input_tokens": 1000, "num_repeated_tokens": 500, "num_cached_tokens": cached},
        "ttft_s": {"mean": ttft_s[0], "p50": ttft_s[0], "p99": ttft_s[-1]},
        "tpot_s": {"p50": 0.002},
        "output_tokens_per_s": 100.0,
        "turns": [{"ttft_s": {"p50": one_s}} for one_s in ttft_s],
    }


def content(*, other_cores: float = 0.0) -> dict[str, Any]:
    runs = []
    for repetition, factor in ((1, 1.0), (2, 2.0), (3, 4.0)):
        for part, placement, cached, first_s in (
            ("conversations", "prefixes", 400, 0.01),
            ("conversations", "load", 100, 0.02),
            ("conversations at an equal rate", "prefixes", 400, 0.01),
            ("conversations at an equal rate", "load", 100, 0.05),
            ("single prompts", "prefixes", 0, 0.033),
            ("single prompts", "load", 0, 0.03),
            ("one worker of each role", "prefixes", 450, 0.03),
        ):
            found = figures(cached=cached, ttft_s=(first_s * factor, first_s * factor * 2))
            rate = 3.5 if part == "conversations at an equal rate" else None
            common = {"part": part, "placement": placement, "repetition": repetition, "rate": rate}
            common["other_cores"] = other_cores
            runs.append({**common, "figures": found})
    return {
        "date": "2026-01-01T00:00:00+00:00",
        "machine": {"cpu": "a CPU", "num_cores": 2},
        "code": {"digest": "abc"},
        "settings": {
            "cluster": {"num_of_each": 4},
            "plan": {"num": 8, "num_turns": 2, "num_words": 9, "num_output": 5, "api": "chat"},
            "singles": {"num": 16, "num_turns": 1, "num_words": 7, "num_output": 6, "api": "completions"},
            "concurrency": 3,
            "think_s": 1.5,
            "rate_share": 0.9,
        },
        "runs": runs,
    }


def test_both_ways_stand_side_by_side_with_the_ratios_of_each_repetition() -> None:
    page = "\n".join(section(content()))
    assert "| cached, of all prompt tokens | 40.0% (40.0% to 40.0%) | 10.0% (10.0% to 10.0%) | 4.00 (" in page
    assert "| cached, of the possible | 80.0% (80.0% to 80.0%) |" in page
    assert "| TTFT p50 of turn 2, ms | 40.0 (20.0 to 80.0) | 80.0 (40.0 to 160.0) | 0.50 (0.50 to 0.50) |" in page
    assert "| TTFT mean, ms | 66.0 (33.0 to 132.0) | 60.0 (30.0 to 120.0) | 1.10 (1.10 to 1.10) |" in page
    assert "| TTFT mean, ms | 20.0 (10.0 to 40.0) | 100.0 (50.0 to 200.0) | 0.20 (0.20 to 0.20) |" in page
    flat = " ".join(page.split())
    assert "90% of the conversations a second" in flat
    assert "(3.50 a second), 16 conversations begin" in flat
    assert "think for 1.5 s before each turn" in flat
    assert "caches 90.0% (90.0% to 90.0%) of the possible" in flat
    assert "4 of each cache 80.0% (80.0% to 80.0%) (0.89 (0.89 to 0.89) of it)" in flat
    assert "16 single prompts of 7 words for 6 tokens each" in flat
    assert "4 prefill and 4 decode workers" in page
    assert "Warning" not in page


def test_a_busy_machine_is_said_and_so_is_a_page_without_figures() -> None:
    assert "the machine had other load: others used up to 0.70 cores" in "\n".join(section(content(other_cores=0.7)))
    assert "No conversations were measured yet" in docs.page(None)
    assert "| TTFT p99, ms |" in docs.page(None, of_conversations=content())


def test_one_run_of_each_way_has_no_brackets() -> None:
    once = copy.deepcopy(content())
    once["runs"] = once["runs"][:7]
    assert "| TTFT mean, ms | 10.0 | 20.0 | 0.50 |" in "\n".join(section(once))
    assert "| TTFT p50, ms | 10.0 | 20.0 | 0.50 |" in "\n".join(section(once))


def test_nobody_is_known_to_hold_anything() -> None:
    assert not blind_router.held_by_nobody("layout", [1, 2], "")


@pytest.mark.parametrize(("given", "num"), [((), 4), (("--workers", "2"), 2)])
def test_the_command_has_the_sizes_of_its_options(given: tuple[str, ...], num: int) -> None:
    options = benchmarks_main.make_parser().parse_args(["conversations", *given, "--repetitions", "2"])
    sizes = command.sizes(options)
    assert (sizes.cluster.num_of_each, sizes.num_repetitions, sizes.plan.num_turns) == (num, 2, 6)
