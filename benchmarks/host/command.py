"""`python -m benchmarks host`: what this process's Python costs in a step, beside goals."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks.code import Code
from benchmarks.host import handoffs
from benchmarks.host.sampling import CASES as SAMPLING
from benchmarks.host.sampling import SamplingCase, sampling
from benchmarks.host.section import FORMAT, section
from benchmarks.host.steps import Steps
from benchmarks.timing import timed
from tandem.bench.machine import machine, now, versions
from tandem.bench.report import json_file
from tandem.core import garbage


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is measured."""

    batch: int = 64  # of sampling
    vocab_size: int = 128_256
    #: (sequences, tokens of context).
    steps: tuple[tuple[int, int], ...] = (
        (64, 1024), (256, 1024), (64, 32_768), (128, 32_768), (32, 131_072), (256, 131_072),
    )  # fmt: skip
    num_open: int = 512  # handoffs at a prefill worker
    num_steps: int = 64  # of each size, behind the first
    budget_s: float = 1.0  # of each other case


#: Among so many steps after an admission the longest is looked for.
_NUM_FIRST = 8
_SMALL_BATCH, _SMALL_BATCH_MS, _STEP_MS = 64, 1.0, 2.5
_ADMISSION_MS = 1.0  # beyond what a step may take
_EVENT_MS = 0.01


def run(json: Path | None, *, sizes: Sizes | None = None) -> None:
    """Print the table, and write it to `json`. Raises `ConfigError` where it cannot be written."""
    measured = measure(sizes or Sizes(), lambda text: Console(stderr=True).print(text, highlight=False))
    content = {"format": FORMAT, "date": now(), "code": Code.of().as_json(), **measured}
    Console(soft_wrap=True).print("\n".join(section(content)).strip(), highlight=False, markup=False)
    if json is not None:
        json_file.write(json, content)


def measure(sizes: Sizes, tell: Callable[[str], None]) -> dict[str, Any]:
    """What was found: plain data."""
    figures = [_sampled(case, sizes, tell) for case in SAMPLING]
    for num_sequences, context in sizes.steps:
        figures += _stepped(num_sequences, context, sizes.num_steps, tell)
    tell("an event of a handoff")
    took = timed(handoffs.event(sizes.num_open), sizes.budget_s, clock=time.thread_time)
    figures.append(_figure(f"an event of one handoff of {sizes.num_open}", took.median_s, _EVENT_MS))
    return {
        "machine": machine(),
        "versions": versions(),
        "num_threads": torch.get_num_threads(),
        "batch": sizes.batch,
        "vocab_size": sizes.vocab_size,
        "figures": figures,
    }


def _sampled(case: SamplingCase, sizes: Sizes, tell: Callable[[str], None]) -> dict[str, Any]:
    tell(f"sampling: {case.name}")
    work = sampling(case, sizes.batch, sizes.vocab_size)
    took = timed(work, sizes.budget_s, clock=time.thread_time)
    return _figure(f"sampling, {case.name}", took.median_s, case.goal_ms)


def _stepped(num_sequences: int, context: int, num_steps: int, tell: Callable[[str], None]) -> Sequence[dict[str, Any]]:
    tell(f"steps of {num_sequences} sequences of {context:,} tokens")
    steps = Steps(num_sequences, context)
    garbage.settle()  # as a worker that is ready
    steps.admit()
    first_s = max(steps.times_s(_NUM_FIRST))
    steps.settle()
    median_s = statistics.median(steps.times_s(num_steps))
    between_s = statistics.median(steps.times_between_s(num_steps))
    gc.unfreeze()
    goal_ms = _SMALL_BATCH_MS if num_sequences <= _SMALL_BATCH else _STEP_MS
    title = f"a step of {num_sequences} × {context:,} tokens"
    return (
        _figure(title, median_s, goal_ms),
        _figure(f"{title}, the longest after all were admitted", first_s, goal_ms + _ADMISSION_MS),
        _figure(f"{title}, what a GPU waits for", between_s, goal_ms),
    )


def _figure(title: str, median_s: float, goal_ms: float) -> dict[str, Any]:
    return {"title": title, "median_s": median_s, "goal_ms": goal_ms}
