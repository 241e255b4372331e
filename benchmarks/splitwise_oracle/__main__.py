"""`python -m benchmarks.splitwise_oracle DIR`: runs of Splitwise's simulator, and the same runs by ours."""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.splitwise_oracle.compare import PERCENTILE_BOUND, REQUEST_BOUND_S, Comparison, compare
from benchmarks.splitwise_oracle.runs import read_runs
from benchmarks.splitwise_oracle.times import read_profile
from benchmarks.splitwise_oracle.world import simulate
from tandem.core.arguments import Parser
from tandem.core.errors import ConfigError


def main(arguments: list[str] | None = None) -> int:
    """0 where each run is within its bounds, 1 where one is not, 2 where the folder cannot be read."""
    options = make_parser().parse_args(arguments)
    profile = options.profile or options.directory / ".." / "splitwise" / "perf_model.csv"
    found: list[Comparison] = []
    try:
        times = read_profile(profile)
        for run in read_runs(options.directory, options.run):
            found.append(compare(run, simulate(run, times)))
            print(found[-1].line(), flush=True)
    except ConfigError as error:
        print(f"benchmarks.splitwise_oracle: {error.message}", file=sys.stderr)
        return 2
    print(total(found))
    return 0 if all(comparison.is_within for comparison in found) else 1


def total(found: list[Comparison]) -> str:
    """The runs within all bounds, and the worst request of all."""
    within = sum(comparison.is_within for comparison in found)
    percentiles = sum(comparison.percentile[0] <= PERCENTILE_BOUND for comparison in found)
    worst = max(found, key=lambda comparison: comparison.worst.diff_s)
    return (
        f"{within} of {len(found)} runs within {REQUEST_BOUND_S:g} s a request, {PERCENTILE_BOUND:.0%} a percentile, "
        f"roles the same; {percentiles} within the percentiles; the worst request is in {worst.name}: {worst.worst}"
    )


def make_parser() -> Parser:
    parser = Parser(
        prog="python -m benchmarks.splitwise_oracle",
        description="Simulate each run of a folder again, and compare each request with what it says.",
    )
    parser.add_argument("directory", type=Path, metavar="DIR", help="with summary.csv, traces/, results/ and machines")
    parser.add_argument("--run", nargs="+", default=[], metavar="NAME", help="these alone (default: all of them)")
    parser.add_argument(
        "--profile", type=Path, metavar="FILE", help="Splitwise's profile (default: DIR/../splitwise/perf_model.csv)"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
