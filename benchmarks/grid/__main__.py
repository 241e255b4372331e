"""Measure Tandem, Tandem colocated and, where vLLM is installed, vLLM at each point of a grid of loads.

    python -m benchmarks.grid --dry-run                          what would be measured
    python -m benchmarks.grid --peer-venv DIR                    all of it: hours
    python -m benchmarks.grid --points 82m-float32-512-256-16    these alone

Each point is a file. Started again, it measures what the files do not hold yet, or hold of other code of Tandem.
docs/benchmarking.md says more; `make docs` puts the files into docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import functools
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.grid.measure import Grid, Model
from benchmarks.grid.points import MODELS, Point, all_points
from benchmarks.peers.__main__ import add_place_options, in_loop, place_of, settings_of, told
from benchmarks.peers.models import ROOT, made_model
from benchmarks.peers.servers import CONTESTANTS, TANDEM_COLOCATED, chosen_contestants
from tandem.bench.load.workload import plain_vocabulary
from tandem.core.errors import ConfigError
from tandem.core.tokenizer import Tokenizer

SERVERS = ("tandem", TANDEM_COLOCATED.name, "peer-colocated")


def main(arguments: list[str] | None = None) -> int:
    """0, 1 where a request failed or a point could not be measured, 130 where it was interrupted."""
    options = _parser().parse_args(arguments)
    console = Console(stderr=True)
    return told("benchmarks.grid", console, lambda: _run(options, console))


def _run(options: argparse.Namespace, console: Console) -> int:
    grid = _grid(options, console)
    if options.dry_run:
        Console().print(plan_table(grid))
        return 0
    num_failed = in_loop(grid.measure)
    num_done = sum(map(grid.is_done, grid.points))
    console.print(f"{grid.directory} holds {num_done} of {len(grid.points)} points", highlight=False, soft_wrap=True)
    if num_failed:
        console.print(f"{num_failed} requests failed", style="red", highlight=False)
    return int(bool(num_failed or grid.failures))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_argument_group("what is measured")
    what.add_argument("--points", nargs="+", metavar="NAME", help="of those that --dry-run lists (default: all)")
    what.add_argument("--models", nargs="+", choices=tuple(MODELS), metavar="NAME",
                      help=f"of {', '.join(MODELS)} (default: all)")  # fmt: skip
    what.add_argument("--servers", nargs="+", default=SERVERS, metavar="NAME",
                      help=f"of {', '.join(SERVERS)} (default: all)")  # fmt: skip
    what.add_argument("--dry-run", action="store_true", help="list the points and what is done of them, and end")
    where = parser.add_argument_group("with what and where")
    add_place_options(where)
    where.add_argument("--out", type=Path, default=ROOT / "docs/figures/grid", metavar="DIR",
                       help="a file for each point (default: docs/figures/grid)")  # fmt: skip
    where.add_argument("--fresh", action="store_true", help="measure all anew; what the files hold is lost")
    return parser


def _grid(options: argparse.Namespace, console: Console) -> Grid:
    among = [*(each for each in CONTESTANTS if each.name in SERVERS), TANDEM_COLOCATED]
    contestants, messages = chosen_contestants(options.servers, options.peer_venv, among)
    for message in messages:
        console.print(message, highlight=False, soft_wrap=True)
    return Grid(
        directory=options.out,
        points=chosen_points(options.points, options.models),
        contestants=contestants,
        place=place_of(options, Path(), ""),
        model=functools.partial(_model, console),
        settings=lambda plan, model: settings_of(plan, model.directory, contestants, options.peer_venv),
        console=console,
        is_fresh=options.fresh,
    )


def chosen_points(names: list[str] | None, models: list[str] | None) -> list[Point]:
    """In their order. Raises `ConfigError` where there is no point of such a name."""
    points = [point for point in all_points() if models is None or point.model in models]
    unknown = set(names or ()) - {point.name for point in points}
    if unknown:
        raise ConfigError(f"no point is called {', '.join(sorted(unknown))}; --dry-run lists them", key="--points")
    return [point for point in points if names is None or point.name in names]


def _model(console: Console, point: Point) -> Model:
    """Made at first use."""
    wanted = MODELS[point.model] if point.dtype == "float32" else {**MODELS[point.model], "dtype": point.dtype}
    directory = made_model(console, point.model, wanted)
    return Model(directory, plain_vocabulary(Tokenizer.from_dir(directory)))


def plan_table(grid: Grid) -> Table:
    """What would be measured, in this order."""
    table = Table("point", "requests", "prompt tokens", "output tokens", "", box=None)
    for column in table.columns[1:4]:
        column.justify = "right"
    for point in grid.points:
        num = point.num_requests
        state = "done" if grid.is_done(point) else ""
        table.add_row(point.name, str(num), f"{num * point.num_input:,}", f"{num * point.num_output:,}", state)
    return table


if __name__ == "__main__":
    sys.exit(main())
