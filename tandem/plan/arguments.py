"""The command line of `tandem plan`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tandem.core.arguments import number, whole
from tandem.core.dtypes import PAGE_DTYPES

_AddCommand = Callable[..., argparse.ArgumentParser]


def add_command_to(commands: Any, add_command: _AddCommand) -> None:
    """`kv`, `roofline`, `batch`, `cost` and `size`, below `plan`."""
    help = "what a model needs: memory, time, batch, cost; and how many workers of which type a load needs"
    example = "tandem plan kv --model llama-3-8b --tokens 8192\ntandem plan size plans/chat.yaml"
    command = add_command(commands, "plan", help, example, None)
    subcommands = command.add_subparsers(dest="subcommand", metavar="SUBCOMMAND", required=True)
    _add_kv(subcommands, add_command)
    _add_roofline(subcommands, add_command)
    _add_batch(subcommands, add_command)
    _add_cost(subcommands, add_command)
    _add_size(subcommands, add_command)


def _add_kv(subcommands: Any, add_command: _AddCommand) -> None:
    command = add_command(
        subcommands,
        "kv",
        "bytes of K and V, of a token and of sequences, and how many of these a card has room for",
        "tandem plan kv --model llama-3-8b --tokens 8192\ntandem plan kv --model ~/models/mine --card h200",
        _run("kv"),
    )
    _add_model(command)
    command.add_argument("--tokens", type=whole(1), default=4096, metavar="N", help="of a sequence (default: 4096)")
    _add_card(command, required=False)


def _add_roofline(subcommands: Any, add_command: _AddCommand) -> None:
    command = add_command(
        subcommands,
        "roofline",
        "how long steps take on a card, and what bounds them: computing, or reading weights and context",
        "tandem plan roofline --model llama-3-70b --card h100 --cards 4\n"
        "tandem plan roofline --model llama-3-8b --card h200 --batch 1 64 256 --tokens 8192",
        _run("roofline"),
    )
    _add_model(command)
    _add_card(command)
    command.add_argument(
        "--batch", type=whole(1), nargs="+", default=[1, 16, 64, 256], metavar="N",
        help="sequences that are generated for (default: 1 16 64 256)",
    )  # fmt: skip
    command.add_argument(
        "--tokens", type=whole(1), nargs="+", default=[2048], metavar="N",
        help="of each sequence's context, and of prompts (default: 2048)",
    )  # fmt: skip


def _add_batch(subcommands: Any, add_command: _AddCommand) -> None:
    command = add_command(
        subcommands,
        "batch",
        "the largest batch of sequences: by the memory for their K and V, and by a target for the time per token",
        "tandem plan batch --model llama-3-8b --card h100 --tokens 4096 --tpot-ms 30",
        _run("batch"),
    )
    _add_model(command)
    _add_card(command)
    command.add_argument("--tokens", type=whole(1), default=4096, metavar="N", help="of each sequence (default: 4096)")
    command.add_argument(
        "--tpot-ms", type=_above_0, metavar="MS", help="time per token that is to hold (default: none)"
    )


def _add_cost(subcommands: Any, add_command: _AddCommand) -> None:
    command = add_command(
        subcommands,
        "cost",
        "what a million tokens of prompts and of output cost on workers that are always busy",
        "tandem plan cost --model llama-3-8b --card h100 --price 2.5 --input 1000 --output 200 --tpot-ms 30",
        _run("cost"),
    )
    _add_model(command)
    _add_card(command)
    command.add_argument("--price", type=_above_0, required=True, metavar="P", help="of one card for an hour")
    command.add_argument("--input", type=whole(1), default=1000, metavar="N", help="tokens of a prompt (default: 1000)")
    command.add_argument("--output", type=whole(1), default=200, metavar="N", help="tokens of output (default: 200)")
    command.add_argument(
        "--tpot-ms", type=_above_0, metavar="MS", help="time per token that is to hold (default: none)"
    )


def _add_size(subcommands: Any, add_command: _AddCommand) -> None:
    command = add_command(
        subcommands,
        "size",
        "the cheapest pools, of which types, that keep a load's targets: by arithmetic, then by simulation",
        "tandem plan size plans/chat.yaml\ntandem plan size plans/chat.yaml --json found.json --out cluster/",
        _run("size"),
    )
    command.add_argument("file", type=Path, metavar="FILE", help="YAML: model, load, targets, types; docs/planning.md")
    command.add_argument("--json", type=Path, metavar="FILE", help="write everything there, each try among it")
    command.add_argument("--out", type=Path, metavar="DIR", help="write a tandem.yaml and a cluster.yaml there")
    command.add_argument(
        "--cluster", type=Path, metavar="FILE", help="the cluster.yaml whose pools are sized (default: its pools alone)"
    )
    command.add_argument("--processes", type=whole(1), metavar="N", help="simulations at once (default: all cores)")


def _add_model(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--model",
        required=True,
        metavar="NAME_OR_DIR",
        help="a known model (llama-3-8b, …), or a directory with config.json",
    )
    command.add_argument(
        "--weight-bits", type=_bits, default=16.0, metavar="N", help="of a parameter in memory (default: 16)"
    )
    command.add_argument(
        "--kv-dtype", choices=sorted(PAGE_DTYPES), default="bfloat16", help="of K and V (default: bfloat16)"
    )


def _add_card(command: argparse.ArgumentParser, *, required: bool = True) -> None:
    command.add_argument("--card", required=required, metavar="NAME", help="a known card: a100, h100, h200, …")
    command.add_argument(
        "--cards", type=whole(1), default=1, metavar="N", help="of a worker, which share all work evenly (default: 1)"
    )


def _above_0(text: str) -> float:
    return float(number(text, float, lambda value: 0 < value < float("inf"), "a number above 0"))


def _bits(text: str) -> float:
    return float(number(text, float, lambda value: 0 < value <= 64, "a number of bits, above 0 and at most 64"))


def _run(name: str) -> Callable[[argparse.Namespace], int]:
    def run(options: argparse.Namespace) -> int:
        from tandem.plan import command

        called: Callable[[argparse.Namespace], int] = getattr(command, name)
        return called(options)

    return run
