"""The options of `tandem bench advise`. Imports nothing heavy: `tandem --help` reads this too."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

from tandem.bench.arguments import AddCommand, add_load_options, add_shape, add_slo, count, share
from tandem.core.arguments import whole


def add_advise_to(subcommands: Any, add_command: AddCommand) -> None:
    """`advise`, below `bench`."""
    command = add_command(
        subcommands,
        "advise",
        "should this load be split? put it on a colocated cluster and on splits of the same size, on this machine, in "
        "turn, and say which suits",
        "tandem bench advise --trace AzureLLMInferenceTrace_conv.csv --limit 300 --scale-lengths 0.125\n"
        "tandem bench advise --trace my.csv --model ~/models/llama-1b --workers 4 --slo-ttft 2s --slo-tpot 60ms\n"
        "tandem bench advise --concurrency 8 --input-len 512 --output-len 64 --json advice.json --plot advice.png\n"
        "tandem bench advise --trace my.csv --simulate scenarios/two_cores.yaml --workers 8",
        _advise,
    )
    clusters = command.add_argument_group("clusters", "each run starts one, with a free port, and ends it")
    clusters.add_argument("--simulate", type=Path, metavar="FILE", help="start none: simulate them with the times and "
                          "the workers of this scenario (`tandem sim`), for a trace or --rate; seconds")  # fmt: skip
    clusters.add_argument("--model", metavar="DIR_OR_HUB_ID", help="what they serve (default: of --config, else the "
                          "embedded model)")  # fmt: skip
    clusters.add_argument("--config", type=Path, metavar="FILE", help="the tandem.yaml of all of them; pools and port "
                          "are set here")  # fmt: skip
    size = clusters.add_mutually_exclusive_group()
    size.add_argument("--workers", type=whole(2), default=2, metavar="N",
                      help="workers of each cluster: 0+N and all splits, 1+(N-1) and so on (default: 2)")  # fmt: skip
    size.add_argument("--clusters", type=_pools, nargs="+", metavar="P+D", help="these instead: prefill and decode "
                      "workers, such as 0+2 1+1; one of them colocated, 0+D")  # fmt: skip
    clusters.add_argument("--logs", type=Path, default=Path("~/.cache/tandem/advise"), metavar="DIR",
                          help="where they write what they say (default: ~/.cache/tandem/advise)")  # fmt: skip
    judging = command.add_argument_group("judgement")
    judging.add_argument("--repetitions", type=count, default=4, metavar="N", help="runs of the load on each cluster; "
                         "they tell what is chance (default: 4)")  # fmt: skip
    judging.add_argument("--margin", type=share, default=0.05, metavar="F", help="differences below this share do not "
                         "count (default: 0.05)")  # fmt: skip
    add_slo(judging, ttft=None, tpot=None, otherwise="the clusters' own, `slo` of --config")
    report = add_load_options(command, has_records=False)
    report.add_argument("--plot", type=Path, metavar="FILE", help="draw the figures there, as PNG, SVG or PDF "
                        "(needs matplotlib: the `bench` extra)")  # fmt: skip
    add_shape(command, "requests")


def _pools(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d{1,4})\+(\d{1,4})", text)
    if found is None or not int(found[2]):
        raise argparse.ArgumentTypeError(f"{text!r} names no cluster; write it as 1+2: prefill and decode workers")
    return int(found[1]), int(found[2])


def _advise(options: argparse.Namespace) -> int:
    from tandem.advise.command import run  # it needs much that `--help` does not

    return run(options)
