"""Measure Tandem, Tandem colocated and, where vLLM is installed, vLLM at each point of a grid of loads.

    python -m benchmarks.grid --dry-run                          what would be measured
    python -m benchmarks.grid --peer-venv DIR                    all of it: hours
    python -m benchmarks.grid --points 82m-float32-512-256-16    these alone

Each point is a file. Started again, it measures what the files do not hold yet, or hold of other code of Tandem.
docs/benchmarking.md says more; `make docs` puts the files into docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import sys

from rich.console import Console
from rich.table import Table

from benchmarks.grid.measure import Grid
from benchmarks.grid.points import MODELS, Point, all_points
from benchmarks.peers.__main__ import told
from benchmarks.peers.comparisons_command import add_comparison_options, comparisons_of, measured
from benchmarks.peers.models import Model
from tandem.core.errors import ConfigError


def main(arguments: list[str] | None = None) -> int:
    """0, 1 where a request failed or a point could not be measured, 130 where it was interrupted."""
    options = _parser().parse_args(arguments)
    console = Console(stderr=True)
    return told("benchmarks.grid", console, lambda: _run(options, console))


def _run(options: argparse.Namespace, console: Console) -> int:
    grid = Grid(
        comparisons=comparisons_of(options, console),
        points=chosen_points(options.points, options.models),
        model=lambda point: Model.random(console, point.model, MODELS[point.model], point.dtype),
    )
    if options.dry_run:
        Console().print(plan_table(grid))
        return 0
    return measured(grid, console)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_argument_group("what is measured")
    what.add_argument("--points", nargs="+", metavar="NAME", help="of those that --dry-run lists (default: all)")
    what.add_argument("--models", nargs="+", choices=tuple(MODELS), metavar="NAME",
                      help=f"of {', '.join(MODELS)} (default: all)")  # fmt: skip
    add_comparison_options(parser, what, "docs/figures/grid")
    return parser


def chosen_points(names: list[str] | None, models: list[str] | None) -> list[Point]:
    """In their order. Raises `ConfigError` where there is no point of such a name."""
    points = [point for point in all_points() if models is None or point.model in models]
    unknown = set(names or ()) - {point.name for point in points}
    if unknown:
        raise ConfigError(f"no point is called {', '.join(sorted(unknown))}; --dry-run lists them", key="--points")
    return [point for point in points if names is None or point.name in names]


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
