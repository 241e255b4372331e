"""How well several routers place, as a section of `docs/benchmarks.md`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.peers.figures import Goal
from benchmarks.text import wrapped

FORMAT = "tandem-placement/1"

#: p99 of the time in queues with four routers on eight workers of each role, over that with one.
GOAL = Goal(1.15, is_lower=False)
_WITH_GOAL = (8, 8, 4)


def section(content: dict[str, Any]) -> Iterator[str]:
    """Each cluster with one router and with several, all seeds together."""
    settings, sources = content["settings"], content["code"]["digest"]
    num_requests, num_seeds = settings["num_requests"], len(settings["seeds"])
    yield ""
    yield "## Placement by several routers"
    yield ""
    yield from wrapped(
        "Simulated by `python -m benchmarks placement`: the shipped rules of routers, and scripted workers in virtual "
        f"time, so the figures are of no machine (sources {sources}). Requests come at random (Poisson), "
        f"at {settings['load']:.0%} of what prefill computes and decode has places for; prompts and answers are of "
        f"exponential lengths; {num_requests:,} requests for each of {num_seeds} seeds. A ratio is that of "
        "the p99 to one router's, of all seeds together; in brackets the lowest and the highest of one seed."
    )
    yield ""
    yield "| workers | routers | reports of a changed number of requests | mean time in queues | p99 | ratio | goal |"
    yield "|---|---|---|---|---|---|---|"
    for case in content["cases"]:
        reports = "at once" if case["is_prompt"] else f"after up to {case['interval_s']:g} s"
        ratio, goal = "", ""
        if case["num_routers"] > 1:
            low, high = min(case["ratios"]), max(case["ratios"])
            ratio = f"{case['ratio']:.2f} ({low:.2f} to {high:.2f})"
            has_goal = (case["num_prefill"], case["num_decode"], case["num_routers"]) == _WITH_GOAL
            if has_goal and case["is_prompt"]:
                goal = f"{GOAL}: {'reached' if GOAL.is_reached_by(case['ratio']) else '**missed**'}"
        workers = f"{case['num_prefill']} prefill, {case['num_decode']} decode"
        queued = f"{case['mean_s'] * 1e3:,.1f} ms", f"{case['p99_s'] * 1e3:,.0f} ms"
        yield f"| {' | '.join([workers, str(case['num_routers']), reports, *queued, ratio, goal])} |"
