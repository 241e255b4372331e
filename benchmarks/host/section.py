"""What the host does in a step, as a section of `docs/benchmarks.md`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.peers.figures import Goal
from benchmarks.text import wrapped

FORMAT = "tandem-host/1"


def section(content: dict[str, Any]) -> Iterator[str]:
    """Each part's time beside its goal."""
    machine = content["machine"]
    yield ""
    yield "## The host's share of a step"
    yield ""
    words = (
        "Measured by `python -m benchmarks host`, without a model: CPU time of the calling thread, medians, so that "
        "other load on the machine matters little. "
        f"{machine['cpu']}, {content['num_threads']} threads for sampling, sources {content['code']['digest']}, "
        f"{content['date'][:10]}. Sampling is of {content['batch']} rows over {content['vocab_size']:,} tokens; a step "
        "is a decode worker's scheduling, laying out and booking, its sampling and events not counted. "
        "Where a device computes apart, the next step is planned meanwhile: what it waits for is the rest."
    )
    yield from wrapped(words)
    yield ""
    yield "| part | CPU time | goal |"
    yield "|---|---|---|"
    for figure in content["figures"]:
        value_ms, goal = figure["median_s"] * 1e3, Goal(figure["goal_ms"], is_lower=False)
        reached = "reached" if goal.is_reached_by(value_ms) else "**missed**"
        yield f"| {figure['title']} | {value_ms:,.3f} ms | {goal} ms: {reached} |"
