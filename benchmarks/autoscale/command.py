"""`python -m benchmarks autoscale`: laws that size pools, and fixed sizes, on Azure's traces in the simulator."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.autoscale.cases import SCENARIO, SIZES, Case, cases_of, load_of, measured
from benchmarks.autoscale.section import COMMAND, FORMAT, hours_of, section
from benchmarks.code import Code
from tandem.bench.machine import now
from tandem.bench.report import json_file
from tandem.sim.scenario import read_scenario


def run(
    traces: Path, json: Path | None, workers: Sequence[int] = (), num_processes: int = 1, *, goes_on: bool = False
) -> None:
    """Print the table, and write it into `json` after each case. Raises `ConfigError`.

    Args:
        traces: the directory of Azure's files.
        workers: sizes of which all is simulated; empty: all.
        goes_on: what the file has already of these sources is not simulated again.
    """
    sizes = [size for size in SIZES if not workers or size.workers in workers]
    for size in sizes:  # what cannot be read is told before processes start
        load_of(size, traces)
    about, known = _about(), dict[str, Any]()
    if json is not None and json.exists():
        known = of_same_settings(json_file.read_format(json, FORMAT, COMMAND), about)
    done = {key for key, case in known.items() if case.get("code") == about["code"]["digest"]} if goes_on else set()
    wanted = [case for size in sizes for case in cases_of(size) if case.key not in done]
    content, tell = {**about, "cases": known}, Console(stderr=True, soft_wrap=True)
    for number, (key, found) in enumerate(_all(wanted, traces, num_processes), 1):
        kept, hours = f"{found['kept_share']:.1%} kept", f"{hours_of(found):.1f} worker-hours"
        tell.print(f"{number} of {len(wanted)}: {key}: {kept}, {hours}, {found['cpu_s']:.0f} s", highlight=False)
        known[key] = {**found, "code": about["code"]["digest"]}
        content["cases"] = _in_order(known)
        if json is not None:
            json_file.write(json, content)
    Console(soft_wrap=True).print("\n".join(section(content)).strip(), highlight=False, markup=False)


def of_same_settings(content: dict[str, Any], about: dict[str, Any]) -> dict[str, Any]:
    """Cases of a file that may stand beside those of a run like `about`: those of the same settings. Each says of which
    sources it is (`code`)."""
    settings = json.loads(json.dumps(about["settings"]))  # as a file has them
    return dict(content["cases"]) if content["settings"] == settings else {}


def _about() -> dict[str, Any]:
    shape = read_scenario(SCENARIO).shape()
    return {
        "format": FORMAT,
        "date": now(),
        "code": Code.of().as_json(),
        "settings": {
            "scenario": SCENARIO.name,
            "start_s": shape.start_s,
            "ttft_s": shape.ttft_s,
            "tpot_s": shape.tpot_s,
            "sizes": [asdict(size) for size in SIZES],
        },
    }


def _in_order(known: dict[str, Any]) -> dict[str, Any]:
    keys = [case.key for size in SIZES for case in cases_of(size)]
    return {key: known[key] for key in keys if key in known}


def _all(cases: list[Case], traces: Path, num_processes: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each as it ends."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_processes, mp_context=spawn) as executor:
        for done in as_completed([executor.submit(measured, case, traces) for case in cases]):
            yield done.result()
