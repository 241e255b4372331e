"""Search the goodput of Tandem, Tandem colocated and, where vLLM is installed, vLLM on mixes of short and long prompts.

    python -m benchmarks.goodput --dry-run                          what would be measured
    python -m benchmarks.goodput --peer-venv DIR                    all of it: an hour and a half on two cores
    python -m benchmarks.goodput --mixes chats --types bfloat16     with requests alone, which tell what is to be kept

Each point is a file. Started again, it measures what the files do not hold yet, or hold of other code of Tandem.
docs/benchmarking.md says more; `make docs` puts the files into docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace

from rich.console import Console
from rich.table import Table

from benchmarks.goodput.load import Effort
from benchmarks.goodput.measure import Goodput
from benchmarks.goodput.mixes import MIXES
from benchmarks.goodput.points import ALONE, MODEL, TYPES, all_points, alone_loads, mix_of
from benchmarks.peers.__main__ import told
from benchmarks.peers.comparisons_command import add_comparison_options, comparisons_of, measured
from benchmarks.peers.models import MODEL_OPTIONS, Model
from tandem.bench.arguments import count
from tandem.core.arguments import whole


def main(arguments: list[str] | None = None) -> int:
    """0, 1 where a request failed or a point could not be measured, 130 where it was interrupted."""
    options = _parser().parse_args(arguments)
    console = Console(stderr=True)
    return told("benchmarks.goodput", console, lambda: _run(options, console))


def _run(options: argparse.Namespace, console: Console) -> int:
    effort = Effort()
    length = replace(effort.length, least=options.requests, least_s=float(options.seconds))
    goodput = Goodput(
        comparisons=comparisons_of(options, console),
        points=[each for each in all_points() if each.dtype in options.types and each.mix in (ALONE, *options.mixes)],
        model=lambda point: Model.random(console, MODEL, MODEL_OPTIONS, point.dtype),
        mix=mix_of,
        alone_loads=alone_loads(),
        effort=replace(effort, length=length),
    )
    if options.dry_run:
        Console().print(plan_table(goodput))
        return 0
    return measured(goodput, console)


def _parser() -> argparse.ArgumentParser:
    names, length = [mix.name for mix in MIXES], Effort().length
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_argument_group("what is measured")
    what.add_argument("--mixes", nargs="+", choices=names, default=names, metavar="NAME",
                      help=f"of {', '.join(names)} (default: all)")  # fmt: skip
    what.add_argument("--types", nargs="+", choices=TYPES, default=TYPES, metavar="NAME",
                      help=f"of {', '.join(TYPES)} (default: all)")  # fmt: skip
    what.add_argument("--requests", type=count, default=length.least, metavar="N",
                      help=f"at each rate at least (default: {length.least})")  # fmt: skip
    what.add_argument("--seconds", type=whole(0), default=round(length.least_s), metavar="S",
                      help=f"of arrivals at each rate at least (default: {length.least_s:g})")  # fmt: skip
    add_comparison_options(parser, what, "docs/figures/goodput")
    return parser


def plan_table(goodput: Goodput) -> Table:
    """What would be measured, in this order."""
    table = Table("point", "", box=None)
    for point in goodput.points:
        table.add_row(point.name, "done" if goodput.is_done(point) else "")
    return table


if __name__ == "__main__":
    sys.exit(main())
