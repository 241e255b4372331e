"""`tandem sim run`."""

from __future__ import annotations

import time
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tandem.bench.report import json_file
from tandem.bench.report.plot import new_figure
from tandem.core.errors import ConfigError
from tandem.sim.gaps import Gaps
from tandem.sim.report import content, tables
from tandem.sim.scenario import arrivals, read_scenario
from tandem.sim.timeline import Timeline
from tandem.sim.timeline_plot import SUFFIXES, Drawn, write
from tandem.sim.world import World

_AT_ONCE = 100  # requests between two moves of the bar


def run(path: Path, json: Path | None, timeline: Path | None = None) -> int:
    """Simulate the scenario of this file, print what was found, write it to `json` and draw it in `timeline`. Raises
    `ConfigError`."""
    if timeline is not None and timeline.suffix not in SUFFIXES:
        raise ConfigError(f"{timeline} must end with {' or '.join(SUFFIXES)}", key="--timeline")
    if timeline is not None and timeline.suffix == ".png":
        new_figure(height=1.0)  # after the simulation would be late to say that there is no matplotlib
    json_file.check_before(json)
    json_file.check_before(timeline, "--timeline")
    scenario = read_scenario(path)
    load, out, err = arrivals(scenario, path.parent), Console(soft_wrap=True), Console(stderr=True)
    columns = TextColumn("requests"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=err, disable=not err.is_terminal, transient=True) as progress:
        task = progress.add_task("", total=sum(1 for first in load for _ in first.turns()))
        num_ended = 0

        def ended(_: object) -> None:
            nonlocal num_ended
            num_ended += 1
            if num_ended % _AT_ONCE == 0:
                progress.update(task, completed=num_ended)

        drawn = Timeline() if timeline is not None else None
        world = World(scenario.shape(load), ended, timeline=drawn, gaps=Gaps())
        began_s = time.monotonic()
        outcomes = world.run(load)
        found = content(world, scenario, path.stem, outcomes, time.monotonic() - began_s)
    for table in tables(found):
        out.print(table)
    if json is not None:
        json_file.write(json, found)
    if timeline is not None and world.timeline is not None:
        outcomes = [outcome for outcome in outcomes if not outcome.error]
        end_s = max(outcome.last_token_s for outcome in outcomes)
        title = f"{path.stem}: {len(outcomes):,} requests"
        write(timeline, Drawn(title, world.timeline, world.fleet.lives, outcomes, end_s))
    return 0
