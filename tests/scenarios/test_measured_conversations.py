"""`python -m benchmarks conversations`, small: real workers, with prefixes found and with a router that finds none."""

from __future__ import annotations

import pytest

from benchmarks.conversations.cluster import ClusterSpec
from benchmarks.conversations.command import ConversationSizes, measure
from benchmarks.conversations.section import ONE_PAIR, section
from tandem.bench.load.conversations import ConversationPlan


@pytest.mark.timeout(400)  # four clusters, one after the other
async def test_the_same_conversations_are_held_both_ways() -> None:
    sizes = ConversationSizes(
        ClusterSpec(num_of_each=1), ConversationPlan(2, 3, num_words=80, num_output=8),
        ConversationPlan(3, 1, num_words=40, num_output=4), concurrency=1,
        num_repetitions=1, quiet_s=0.0,
    )  # fmt: skip
    content = await measure(sizes, lambda _: None)
    ways = [(run["part"], run["placement"]) for run in content["runs"]]
    assert ways[:2] == [("conversations", "prefixes"), ("conversations", "load")]
    assert ways[2:] == [("single prompts", "prefixes"), ("single prompts", "load"), (ONE_PAIR, "prefixes")]
    assert [run["figures"]["num_succeeded"] for run in content["runs"]] == [6, 6, 3, 3, 6]
    for found in (run["figures"] for run in content["runs"] if run["part"] != "single prompts"):
        assert found["num_succeeded"] == 6
        assert [turn["num"] for turn in found["turns"]] == [2, 2, 2]
        assert found["turns"][0]["cache"]["num_cached_tokens"] == 0
        assert found["cache"]["num_cached_tokens"] > 0  # a single worker of each role has it in any case
    assert "| cached, of the possible |" in "\n".join(section(content))
