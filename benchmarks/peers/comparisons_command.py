"""The command line of many comparisons: which servers, where, and what is told at the end."""

from __future__ import annotations

import argparse
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console

from benchmarks.in_loop import in_loop
from benchmarks.peers.__main__ import add_place_options, place_of, settings_of
from benchmarks.peers.comparisons import OUT, Comparisons
from benchmarks.peers.models import ROOT
from benchmarks.peers.servers import CONTESTANTS, TANDEM_COLOCATED, chosen_contestants

SERVERS = ("tandem", TANDEM_COLOCATED.name, "peer-colocated")


class Measurement(Protocol):
    """Points that are measured one by one."""

    @property
    def comparisons(self) -> Comparisons: ...

    @property
    def points(self) -> Sequence[Any]: ...

    @property
    def failures(self) -> Mapping[str, str]: ...

    def is_done(self, point: Any) -> bool: ...

    def measure(self) -> Coroutine[Any, Any, int]: ...


def add_comparison_options(parser: argparse.ArgumentParser, what: Any, directory: str) -> None:
    """`what` is the group of options that say what is measured; `directory`, below the repository, has the files."""
    what.add_argument("--servers", nargs="+", default=SERVERS, metavar="NAME",
                      help=f"of {', '.join(SERVERS)} (default: all)")  # fmt: skip
    what.add_argument("--dry-run", action="store_true", help="list the points and what is done of them, and end")
    where = parser.add_argument_group("with what and where")
    add_place_options(where)
    where.add_argument(OUT, type=Path, default=ROOT / directory, metavar="DIR",
                       help=f"a file for each point (default: {directory})")  # fmt: skip
    where.add_argument("--fresh", action="store_true", help="measure all anew; what the files hold is lost")


def comparisons_of(options: argparse.Namespace, console: Console) -> Comparisons:
    """By those options. Says which servers are left out, and raises as `chosen_contestants`."""
    among = [*(each for each in CONTESTANTS if each.name in SERVERS), TANDEM_COLOCATED]
    contestants, messages = chosen_contestants(options.servers, options.peer_venv, among)
    for message in messages:
        console.print(message, highlight=False, soft_wrap=True)
    return Comparisons(
        directory=options.out,
        contestants=contestants,
        place=place_of(options, Path(), ""),
        settings=lambda plan, model: settings_of(plan, model, contestants, options.peer_venv),
        console=console,
        is_fresh=options.fresh,
    )


def measured(measurement: Measurement, console: Console) -> int:
    """Measure what is left, and say what came of it; 0, or 1 where a request failed or a point was not measured."""
    num_failed = in_loop(measurement.measure)
    num_done = sum(map(measurement.is_done, measurement.points))
    directory = measurement.comparisons.directory
    console.print(f"{directory} holds {num_done} of {len(measurement.points)} points", highlight=False, soft_wrap=True)
    if num_failed:
        console.print(f"{num_failed} requests failed", style="red", highlight=False)
    return int(bool(num_failed or measurement.failures))
