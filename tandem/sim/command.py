"""`tandem sim run`."""

from __future__ import annotations

import time
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tandem.bench.report import json_file
from tandem.sim.report import content, tables
from tandem.sim.scenario import arrivals, read_scenario
from tandem.sim.world import World

_AT_ONCE = 100  # requests between two moves of the bar


def run(path: Path, json: Path | None) -> int:
    """Simulate the scenario of this file, print what was found, and write it to `json`. Raises `ConfigError`."""
    scenario = read_scenario(path)
    load, out, err = arrivals(scenario, path.parent), Console(soft_wrap=True), Console(stderr=True)
    columns = TextColumn("requests"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=err, disable=not err.is_terminal, transient=True) as progress:
        task = progress.add_task("", total=len(load))
        num_ended = 0

        def ended(_: object) -> None:
            nonlocal num_ended
            num_ended += 1
            if num_ended % _AT_ONCE == 0:
                progress.update(task, completed=num_ended)

        world, began_s = World(scenario.shape(), ended), time.monotonic()
        outcomes = world.run(load)
        found = content(world, outcomes, time.monotonic() - began_s)
    for table in tables(found):
        out.print(table)
    if json is not None:
        json_file.write(json, found)
    return 0
