"""`python -m benchmarks conversations`: multi-turn loads on 4P4D, placed by prefixes and by load alone, in turn.

They are held in a closed loop, where the faster way is given more to do, and at an equal rate, which is a share of what
placement by load alone reaches in its closed loop. Beside them, how much one worker of each role finds in its cache
that has as much memory as all of those, and what looking for prefixes costs where there are none: single prompts that
have nothing in common.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvloop
from rich.console import Console

from benchmarks.conversations.cluster import ROUTERS, ClusterSpec, running
from benchmarks.conversations.section import (
    CONVERSATIONS,
    EQUAL_RATE,
    FORMAT,
    ONE_PAIR,
    SINGLES,
    TIMES_AS_MANY,
    section,
)
from benchmarks.origin import origin
from tandem.bench.load.conversations import ConversationPlan
from tandem.bench.machine import now
from tandem.bench.other_load import OtherLoad
from tandem.bench.report import json_file
from tandem.bench.report.summary import Summary, summarise
from tandem.bench.session import Session, Shape, Target, Workload
from tandem.core.errors import TandemError

_QUIET_S = 2.0

#: What is measured in each repetition, and how it is placed.
PARTS = (
    *((part, placement) for part in (CONVERSATIONS, EQUAL_RATE, SINGLES) for placement in ROUTERS),
    (ONE_PAIR, "prefixes"),
)


@dataclass(frozen=True)
class ConversationSizes:
    """How much is measured. The embedded model's context bounds the turns times their words and tokens.

    Attributes:
        think_s: mean pause before a turn, at an equal rate.
        rate_share: the equal rate, of the conversations a second that placement by load alone reaches in its closed
            loop of the same repetition.
    """

    cluster: ClusterSpec = field(default_factory=ClusterSpec)
    plan: ConversationPlan = field(default_factory=lambda: ConversationPlan(32, 6, num_words=150, num_output=40))
    singles: ConversationPlan = field(default_factory=lambda: ConversationPlan(192, 1, num_words=300, num_output=40))
    concurrency: int = 8
    think_s: float = 1.0
    rate_share: float = 0.9
    num_repetitions: int = 3
    quiet_s: float = _QUIET_S
    parts: tuple[tuple[str, str], ...] = PARTS


def run(json: Path | None, sizes: ConversationSizes) -> None:
    """Print the section, and write everything to `json`.

    Raises:
        ConfigError: it cannot be written.
        TandemError: a process ended, was not ready in time, or a request failed.
    """
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        content = runner.run(measure(sizes, lambda text: Console(stderr=True).print(text, highlight=False)))
    Console(soft_wrap=True).print("\n".join(section(content)).strip(), highlight=False, markup=False)
    if json is not None:
        json_file.write(json, content)


def sizes(options: argparse.Namespace) -> ConversationSizes:
    """Those of the command's options."""
    usual = ConversationSizes()
    return dataclasses.replace(
        usual,
        cluster=ClusterSpec(num_of_each=options.workers, transport=options.transport),
        plan=dataclasses.replace(usual.plan, num=options.conversations),
        num_repetitions=options.repetitions,
    )


async def measure(sizes: ConversationSizes, tell: Callable[[str], None]) -> dict[str, Any]:
    """Plain data. Both ways to place have the same texts in each repetition, and workers with empty caches."""
    runs: list[dict[str, Any]] = []
    for repetition in range(1, sizes.num_repetitions + 1):
        for part, placement in sizes.parts:
            tell(f"repetition {repetition} of {sizes.num_repetitions}: {part}, placed by {placement}")
            load = OtherLoad()
            await asyncio.sleep(sizes.quiet_s)
            other_cores = load.cores()
            rate = _equal_rate(sizes, runs, repetition) if part == EQUAL_RATE else None
            summary = await _measure_one(sizes, part, placement, repetition, rate)
            common = {"part": part, "placement": placement, "repetition": repetition, "date": now(), "rate": rate}
            figures = dataclasses.asdict(dataclasses.replace(summary, itl_windows=()))
            runs.append({**common, "other_cores": other_cores, "figures": figures})
    settings = {
        "cluster": dataclasses.asdict(sizes.cluster),
        "plan": dataclasses.asdict(sizes.plan),
        "singles": dataclasses.asdict(sizes.singles),
        "concurrency": sizes.concurrency,
        "think_s": sizes.think_s,
        "rate_share": sizes.rate_share,
    }
    return {
        "format": FORMAT,
        **origin(),
        "settings": settings,
        "runs": runs,
    }


def _equal_rate(sizes: ConversationSizes, runs: Sequence[Mapping[str, Any]], repetition: int) -> float:
    """Conversations a second, by the closed loop that was measured before."""
    whole = (CONVERSATIONS, "load", repetition)
    followed = next(run for run in runs if (run["part"], run["placement"], run["repetition"]) == whole)
    return float(sizes.rate_share * sizes.plan.num / followed["figures"]["duration_s"])


async def _measure_one(
    sizes: ConversationSizes, part: str, placement: str, seed: int, rate: float | None = None
) -> Summary:
    plan = sizes.singles if part == SINGLES else sizes.plan
    if rate is not None:
        plan = dataclasses.replace(plan, num=TIMES_AS_MANY * plan.num, think_s=sizes.think_s)
    workload = Workload.of_conversations(plan, seed=seed)
    cluster = sizes.cluster
    if part == ONE_PAIR:
        cluster = dataclasses.replace(cluster, num_of_each=1, kv_bytes=cluster.kv_bytes * cluster.num_of_each)
    with tempfile.TemporaryDirectory(prefix="tandem-conversations-") as directory:
        async with running(Path(directory), cluster, placement) as url:
            session = Session(Target(url), workload)
            await session.open()
            load = await session.measure(Shape(rate=rate) if rate else Shape(concurrency=sizes.concurrency))
    if session.was_interrupted:
        raise KeyboardInterrupt
    summary = summarise(load.records, load.duration_s)
    if summary.num_failed:
        raise TandemError(f"requests failed: {summary.num_failed}, such as: {summary.failure_examples}")
    return summary
