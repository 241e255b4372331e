"""`python -m benchmarks conversations`, small: real workers, with prefixes found and with a router that finds none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.conversations.cluster import ClusterSpec
from benchmarks.conversations.command import PARTS, ConversationSizes, measure
from benchmarks.conversations.section import CONVERSATIONS, EQUAL_RATE, section
from tandem.bench.load.conversations import ConversationPlan


@pytest.mark.timeout(300)  # two clusters, one after the other
@pytest.mark.faults
async def test_the_same_conversations_are_held_both_ways() -> None:
    sizes = ConversationSizes(
        ClusterSpec(num_of_each=1), ConversationPlan(2, 3, num_words=80, num_output=8),
        ConversationPlan(3, 1, num_words=40, num_output=4), concurrency=1,
        num_repetitions=1, quiet_s=0.0, think_s=0.01,
        parts=((CONVERSATIONS, "load"), (EQUAL_RATE, "prefixes")),
    )  # fmt: skip
    content = await measure(sizes, lambda _: None)
    held, equal = content["runs"]
    assert [(run["part"], run["placement"]) for run in content["runs"]] == list(sizes.parts)
    assert [run["figures"]["num_succeeded"] for run in content["runs"]] == [6, 12]
    assert equal["rate"] == pytest.approx(0.9 * 2 / held["figures"]["duration_s"])
    assert held["rate"] is None
    assert [turn["num"] for turn in held["figures"]["turns"]] == [2, 2, 2]
    assert held["figures"]["turns"][0]["cache"]["num_cached_tokens"] == 0
    assert held["figures"]["cache"]["num_cached_tokens"] > 0  # a single worker of each role has it in any case


def test_the_page_shows_both_ways_and_their_ratio() -> None:
    content = json.loads(Path("docs/figures/conversations.json").read_text())
    page = "\n".join(section(content))
    assert "| cached, of the possible |" in page
    assert {(run["part"], run["placement"]) for run in content["runs"]} == set(PARTS)
