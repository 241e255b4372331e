"""`python -m benchmarks paper`: the comparisons of Splitwise's paper, simulated again."""

from __future__ import annotations

import multiprocessing
from collections.abc import Container, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.code import Code
from benchmarks.paper.cases import Bench, Case, cases_of, measured
from benchmarks.paper.clusters import SCENARIOS, WORKLOADS
from benchmarks.paper.section import COMMAND, FORMAT, section
from benchmarks.paper.systems import SYSTEMS
from benchmarks.splitwise_oracle.times import read_profile
from tandem.bench.machine import now
from tandem.bench.report import json_file
from tandem.core.errors import ConfigError


@dataclass(frozen=True)
class Wanted:
    """Attributes:
    scenarios, systems: of which all is simulated.
    goes_on: what the file has already is not simulated again.
    """

    scenarios: Sequence[str] = SCENARIOS
    systems: Sequence[str] = SYSTEMS
    goes_on: bool = False

    def cases(self, known: Container[str]) -> dict[str, Case]:
        """By key; `known` are in the file."""
        cases = (case for scenario in self.scenarios for case in cases_of(scenario))
        found = {case.key: case for case in cases if case.system in self.systems}
        return {key: case for key, case in found.items() if not (self.goes_on and key in known)}


def run(bench: Bench, wanted: Wanted, json: Path | None, num_processes: int = 2) -> None:
    """Print what is known, and write it into `json`, where figures of other cases stay. Raises `ConfigError`."""
    read_profile(bench.profile)  # what cannot be read is told before processes start
    for workload in WORKLOADS:
        bench.lengths(workload)
    content: dict[str, Any] = {"format": FORMAT, "cases": {}}
    if json is not None and json.exists():
        content = json_file.read_format(json, FORMAT, COMMAND)
    rates = bench.sizes.rates
    settings = {**asdict(bench.sizes), "rates": {"first": rates[0], "last": rates[-1], "step": rates[1] - rates[0]}}
    if content.get("settings", settings) != settings:
        raise ConfigError(f"{json} has figures of other sizes; name another file", key="--json")
    content |= {"date": now(), "code": Code.of().as_json(), "settings": settings}
    cases = wanted.cases(content["cases"])
    tell = Console(stderr=True, soft_wrap=True)
    for number, (key, found) in enumerate(_all(list(cases.values()), bench, num_processes), 1):
        tell.print(f"{number} of {len(cases)}: {key}: {_short(found)}, {found['cpu_s']:.0f} s", highlight=False)
        content["cases"][key] = found
        if json is not None:
            json_file.write(json, {**content, "cases": dict(sorted(content["cases"].items()))})
    Console(soft_wrap=True).print("\n".join(section(content)).strip(), highlight=False, markup=False)


def _all(cases: list[Case], bench: Bench, num_processes: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each as it ends."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_processes, mp_context=spawn) as executor:
        for done in as_completed([executor.submit(measured, case, bench) for case in cases]):
            yield done.result()


def _short(found: dict[str, Any]) -> str:
    if "least" in found:
        return ", ".join(f"{what} {nums[0]}+{nums[1]}" for what, nums in found["least"].items()) or "nothing passes"
    if "per_s" in found:
        return f"{found['per_s']:.1f} requests/s"
    return f"{found['rate']} requests/s"
