"""The command line of `tandem sim`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tandem.core.arguments import whole

_AddCommand = Callable[..., argparse.ArgumentParser]


def add_command_to(commands: Any, add_command: _AddCommand) -> None:
    """`run`, below `sim`."""
    help = "simulate a cluster: what ships decides, and steps and transfers only take time"
    example = "tandem sim run scenarios/two_of_each.yaml"
    command = add_command(commands, "sim", help, example, None)
    subcommands = command.add_subparsers(dest="subcommand", metavar="SUBCOMMAND", required=True)
    run = add_command(
        subcommands,
        "run",
        "simulate what a file describes, and print latencies, throughput and how busy the pools were",
        "tandem sim run scenarios/two_of_each.yaml\ntandem sim run my.yaml --json found.json --timeline found.html",
        _run,
    )
    run.add_argument(
        "scenario", type=Path, metavar="FILE", help="YAML: cluster, times of steps, load; see docs/simulator.md"
    )
    run.add_argument(
        "--json", type=Path, metavar="FILE",
        help="write everything there, each request among it; `tandem bench compare` and `plot` read it",
    )  # fmt: skip
    run.add_argument(
        "--timeline", type=Path, metavar="FILE",
        help="draw there what each worker did over time: a page (.html), or a picture (.png; needs the `bench` extra)",
    )  # fmt: skip
    calibrate = add_command(
        subcommands,
        "calibrate",
        "fit a scenario's `fitted` times to the steps that a cluster has taken (metrics.step_log)",
        "tandem sim calibrate step-logs/\ntandem sim calibrate step-logs/ --out times.yaml",
        _calibrate,
    )
    calibrate.add_argument(
        "logs", type=Path, nargs="+", metavar="DIR_OR_FILE", help="what workers wrote with metrics.step_log"
    )
    calibrate.add_argument(
        "--shared-cores",
        type=whole(1),
        default=0,
        metavar="N",
        help="all ran on one host, and so many of their steps are computed at a time: as many as it has cores, where a "
        "step takes one; find how they slow each other down, too (`cores`)",
    )
    calibrate.add_argument("--out", type=Path, metavar="FILE", help="write the times there, as a scenario has them")


def _run(options: argparse.Namespace) -> int:
    from tandem.sim.command import run

    return run(options.scenario, options.json, options.timeline)


def _calibrate(options: argparse.Namespace) -> int:
    from tandem.sim.calibrate import run

    return run(options.logs, options.out, num_cores=options.shared_cores)
