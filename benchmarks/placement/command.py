"""`python -m benchmarks placement`: several routers beside one, on the same requests."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.code import Code
from benchmarks.placement.section import FORMAT, section
from benchmarks.placement.world import PlacementSpec, PlacementWorld, p99, queued_s
from tandem.bench.machine import now
from tandem.bench.report import json_file


@dataclass(frozen=True)
class PlacementCase:
    """Some routers on a cluster, and what they are compared with."""

    num_workers: int  # of each role
    num_routers: int
    is_prompt: bool = True


#: The first of each number of workers is what the others are compared with.
CASES = (
    PlacementCase(8, 1),
    PlacementCase(8, 4),
    PlacementCase(8, 4, is_prompt=False),
    PlacementCase(64, 1),
    PlacementCase(64, 8),
)


def run(json: Path | None, *, seeds: Sequence[int] = (1, 2, 3), num_requests: int = 12_000) -> None:
    """Print the table, and write it to `json`. Raises `ConfigError` where it cannot be written."""
    measured = measure(CASES, seeds, num_requests, lambda text: Console(stderr=True).print(text, highlight=False))
    content = {"format": FORMAT, "date": now(), "code": Code.of().as_json(), **measured}
    Console(soft_wrap=True).print("\n".join(section(content)).strip(), highlight=False, markup=False)
    if json is not None:
        json_file.write(json, content)


def measure(
    cases: Sequence[PlacementCase], seeds: Sequence[int], num_requests: int, tell: Callable[[str], None]
) -> dict[str, Any]:
    """What was found: plain data."""
    found: list[dict[str, Any]] = []
    first: dict[int, list[list[float]]] = {}
    spec = PlacementSpec(num_requests=num_requests)
    for case in cases:
        of_case = replace(spec, **_of(case))
        runs = []
        for seed in seeds:
            tell(f"{case.num_workers} + {case.num_workers} workers, {case.num_routers} routers, seed {seed}")
            runs.append(queued_s(PlacementWorld(replace(of_case, seed=seed)).run()))
        base = first.setdefault(case.num_workers, runs)
        everything, of_base = sorted(chain(*runs)), sorted(chain(*base))
        found.append(
            {
                **_of(case),
                "interval_s": of_case.interval_s,
                "mean_s": statistics.fmean(everything),
                "p99_s": p99(everything),
                "ratio": p99(everything) / p99(of_base),
                "ratios": [p99(own) / p99(theirs) for own, theirs in zip(runs, base, strict=True)],
            }
        )
    settings = {"load": spec.load, "num_requests": num_requests, "seeds": list(seeds)}
    return {"settings": settings, "cases": found}


def _of(case: PlacementCase) -> dict[str, Any]:
    figures = asdict(case)
    num = figures.pop("num_workers")
    return {"num_prefill": num, "num_decode": num, **figures}
