"""The options of `tandem bench …`. Imports nothing heavy: `tandem --help` reads this too."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tandem.core.arguments import number, whole

#: Adds a command by its name, help, example and handler, and gives its parser.
AddCommand = Callable[..., argparse.ArgumentParser]

_DURATION = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ms|s)")


def add_subcommands(command: argparse.ArgumentParser, add_command: AddCommand) -> Any:
    """`run`, `goodput`, `compare`, `plot`, `overload` and `cache`, below `command`; to what others can be added."""
    subcommands = command.add_subparsers(dest="subcommand", metavar="SUBCOMMAND", required=True)
    _add_run(subcommands, add_command)
    _add_goodput(subcommands, add_command)
    _add_compare(subcommands, add_command)
    _add_plot(subcommands, add_command)
    _add_overload(subcommands, add_command)
    _add_cache(subcommands, add_command)
    return subcommands


def _add_run(subcommands: Any, add_command: AddCommand) -> None:
    command = add_command(
        subcommands,
        "run",
        "put one load on a server and print its latencies and throughput",
        "tandem bench run --concurrency 8 --input-len 128 --output-len 128\n"
        "tandem bench run --rate 2 --num-requests 200 --slo-ttft 3s --slo-tpot 50ms --json poisson.json\n"
        "tandem bench run --trace AzureLLMInferenceTrace_conv.csv --limit 300 --scale-lengths 0.125\n"
        "tandem bench run --conversations 32 --turns 6 --concurrency 8 --input-len 100 --output-len 50 --api chat",
        _run,
    )
    _add_server(command)
    add_load_options(command)
    add_shape(command, "requests (or conversations)")
    talk = command.add_argument_group("conversations", "each turn's prompt is all that was said before, and a new text")
    talk.add_argument("--conversations", type=count, metavar="N", help="hold N conversations; --input-len counts the "
                      "words of a user's text")  # fmt: skip
    talk.add_argument("--turns", type=count, default=6, metavar="N", help="turns of each (default: 6)")
    talk.add_argument("--think-time", type=duration_s, default=0.0, metavar="TIME", help="mean pause before the next "
                      "turn, of an exponential distribution, such as 2s (default: none)")  # fmt: skip
    talk.add_argument("--api", choices=("completions", "chat"), default="completions",
                      help="what they are held over (default: completions)")  # fmt: skip
    add_slo(command, ttft=None, tpot=None)


def _add_goodput(subcommands: Any, add_command: AddCommand) -> None:
    command = add_command(
        subcommands,
        "goodput",
        "find the highest Poisson rate at which nearly all requests keep an SLO",
        "tandem bench goodput --slo-ttft 3s --slo-tpot 50ms --num-requests 300\n"
        "tandem bench goodput --trace AzureLLMInferenceTrace_conv.csv --limit 300 --scale-lengths 0.125",
        _run,
    )
    _add_server(command)
    add_load_options(command)
    add_slo(command, ttft="3s", tpot="50ms")
    command.add_argument(
        "--share", type=share, default=0.9, metavar="F", help="share of requests that must keep the SLO (default: 0.9)"
    )
    command.add_argument(
        "--start-rate", type=_positive, default=1.0, metavar="R", help="rate to try first (default: 1)"
    )
    command.add_argument(
        "--precision", type=_ratio, default=1.05, metavar="F",
        help="stop when the ratio of the bounds is no larger than this (default: 1.05)",
    )
    command.add_argument("--max-probes", type=count, default=12, metavar="N", help="most rates to try (default: 12)")


def _add_compare(subcommands: Any, add_command: AddCommand) -> None:
    command = add_command(
        subcommands,
        "compare",
        "print the ratios of one measurement to another, or to a simulation (tandem sim run --json)",
        "tandem bench compare tandem.json peer.json\n"
        "tandem bench compare tandem-1.json,tandem-2.json,tandem-3.json peer-1.json,peer-2.json,peer-3.json",
        _run,
    )
    command.add_argument(
        "first", type=_paths, metavar="A.json", help="results to divide; of several (A1,A2,A3) the medians"
    )
    command.add_argument("second", type=_paths, metavar="B.json", help="results to divide by")


def _add_plot(subcommands: Any, add_command: AddCommand) -> None:
    command = add_command(
        subcommands,
        "plot",
        "plot latency against rate and ITL over time, as PNG and HTML",
        "tandem bench plot tandem.json peer.json --output plots/bench",
        _run,
    )
    command.add_argument(
        "files", type=Path, nargs="+", metavar="FILE", help="results that --json wrote, of `tandem sim run` too"
    )
    command.add_argument(
        "--output", type=Path, default=Path("bench"), metavar="STEM",
        help="write STEM.html and STEM-*.png (default: bench)",
    )


def _add_overload(subcommands: Any, add_command: AddCommand) -> None:
    command = add_command(
        subcommands,
        "overload",
        "find a router's capacity without refusals, then load it far beyond; about 3 minutes",
        "tandem bench overload --json overload.json",
        _run,
    )
    _add_server(command)
    command.add_argument("--json", type=Path, metavar="FILE", help="write the report there (default: standard output)")
    command.add_argument("--prompt-words", type=count, default=64, metavar="N", help="words in a prompt (default: 64)")
    command.add_argument("--max-tokens", type=count, default=32, metavar="N", help="tokens to generate (default: 32)")
    command.add_argument("--seconds", type=_positive, default=60.0, help="length of the overload (default: 60)")
    command.add_argument(
        "--factor", type=_positive, default=20.0, help="load as a multiple of the capacity (default: 20)"
    )
    command.add_argument(
        "--max-sockets", type=count, default=1024, metavar="N",
        help="most open requests; further ones are not sent (default: 1024)",
    )
    command.add_argument("--seed", type=int, default=1)


def _add_cache(subcommands: Any, add_command: AddCommand) -> None:
    command = add_command(
        subcommands,
        "cache",
        "replay a trace on the router's page index alone: what prefix caches would hold; no server; seconds",
        "tandem bench cache conversation_trace.jsonl\n"
        "tandem bench cache conversation_trace.jsonl --workers 8 --pages 4000 --json cache.json",
        _run,
    )
    command.add_argument("file", type=Path, metavar="FILE", help="a trace that names the blocks of its prompts")
    command.add_argument("--format", choices=("mooncake",), help="format of the trace (default: recognised)")
    _add_block_size(command)
    command.add_argument("--limit", type=count, metavar="N", help="only its first N requests")
    command.add_argument(
        "--workers", type=count, default=1, metavar="N",
        help="caches; where there are several, requests are placed by what these hold, and for comparison by load "
        "alone (default: 1)",
    )  # fmt: skip
    command.add_argument(
        "--pages", type=count, metavar="M",
        help="blocks of the trace that each cache has room for, the least recently used given up (default: no limit)",
    )
    command.add_argument(
        "--tokens-per-s", type=_positive, default=10_000.0, metavar="R",
        help="prompt tokens that a worker computes in a second of the trace; a holder with a long queue is passed over "
        "(default: 10000)",
    )  # fmt: skip
    command.add_argument("--json", type=Path, metavar="FILE", help="write all results there")


def _add_block_size(command: Any) -> None:
    command.add_argument(
        "--block-size", type=count, default=512, metavar="N",
        help="tokens of a block that the trace names (default: 512, as Mooncake's)",
    )


def _add_server(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--url",
        default="http://127.0.0.1:8000",
        help="an OpenAI-compatible server; its API key is read from TANDEM_API_KEY or OPENAI_API_KEY "
        "(default: http://127.0.0.1:8000)",
    )
    command.add_argument("--model", metavar="NAME", help="served name of the model (default: the first of /v1/models)")


def add_shape(command: argparse.ArgumentParser, what: str) -> None:
    """When requests come; at the trace's own times where neither is given."""
    shape = command.add_mutually_exclusive_group()
    shape.add_argument("--concurrency", type=count, metavar="N", help="a closed loop of N clients")
    shape.add_argument("--rate", type=_positive, metavar="R", help=f"a Poisson process of R {what} a second")


def add_load_options(command: argparse.ArgumentParser, *, has_records: bool = True) -> Any:
    """What is asked, and what is told of it; gives the group of the latter."""
    load = command.add_argument_group("load")
    load.add_argument("--input-len", type=count, default=512, metavar="N", help="tokens of a prompt (default: 512)")
    load.add_argument("--output-len", type=count, default=64, metavar="N", help="tokens to generate (default: 64)")
    load.add_argument(
        "--num-requests", type=count, metavar="N", help="requests to send (default: 64; of a trace, all)"
    )
    load.add_argument(
        "--warmup", type=_natural, default=2, metavar="N", help="requests to send first, not counted (default: 2)"
    )
    load.add_argument("--seed", type=int, default=1, help="seed of prompts and arrivals; take another for "
                      "each run where the server caches prefixes (default: 1)")  # fmt: skip
    load.add_argument("--ignore-eos", action=argparse.BooleanOptionalAction, default=True,
                      help="ask the server not to end before the length is reached (default: yes)")  # fmt: skip
    load.add_argument("--tokenizer", type=Path, metavar="DIR", help="checkpoint whose tokenizer prompts are drawn "
                      "from; needed for traces of texts")  # fmt: skip
    load.add_argument("--vocab", type=_id_range, metavar="LOW:HIGH", help="draw prompts from these token ids, HIGH "
                      "excluded (default: all plain ones of the tokenizer; without a tokenizer 128:256)")  # fmt: skip
    load.add_argument(
        "--timeout", type=_positive, default=600.0, metavar="SECONDS", help="time limit of one answer (default: 600)"
    )
    load.add_argument("--max-connections", type=count, default=4096, metavar="N",
                      help="most connections; requests beyond fail and are counted (default: 4096)")  # fmt: skip
    trace = command.add_argument_group("trace", "lengths and, unless a rate or concurrency is given, arrival times")
    trace.add_argument("--trace", type=Path, metavar="FILE", help="replay the requests of this trace")
    trace.add_argument(
        "--format", choices=("azure", "mooncake", "sharegpt"), help="format of the trace (default: recognised)"
    )
    _add_block_size(trace)
    trace.add_argument("--limit", type=count, metavar="N", help="only its first N requests")
    trace.add_argument("--scale-lengths", type=_positive, default=1.0, metavar="F", help="multiply each length by this")
    trace.add_argument(
        "--cut", type=whole(2), nargs="?", const=0, metavar="N", help="cut requests that are longer than N tokens, "
        "prompt and output together, instead of refusing all (default of N: the server's context)",
    )  # fmt: skip
    times = trace.add_mutually_exclusive_group()
    times.add_argument(
        "--scale-time", type=_positive, default=1.0, metavar="F",
        help="multiply each arrival time by this; 0.5: twice as fast",
    )
    times.add_argument(
        "--speed", dest="scale_time", type=_speed, metavar="F", help="replay so many times as fast: the same as "
        "--scale-time 1/F",
    )  # fmt: skip
    report = command.add_argument_group("report")
    report.add_argument("--json", type=Path, metavar="FILE", help="write all results there")
    if has_records:
        report.add_argument("--records", action="store_true", help="include every request in the results")
        report.add_argument(
            "--label", metavar="TEXT", help="name of the results in `compare` and `plot` (default: the file's name)"
        )
    report.add_argument("--no-progress", dest="progress", action="store_false", help="no progress bar")
    return report


def add_slo(command: Any, *, ttft: str | None, tpot: str | None, otherwise: str = "") -> None:
    """`ttft` and `tpot` are defaults; where there is none, `otherwise` says what holds."""
    for name, default in (("ttft", ttft), ("tpot", tpot)):
        said = f" (default: {default or otherwise})" if default or otherwise else ""
        command.add_argument(
            f"--slo-{name}", type=duration_s, default=default, metavar="TIME",
            help=f"longest {name.upper()} that keeps the SLO, such as 3s or 50ms{said}",
        )  # fmt: skip


# --- values -----------------------------------------------------------------------------------------------------------


def duration_s(text: str) -> float:
    """`3s` or `50ms`, in seconds."""
    found = _DURATION.fullmatch(text.strip())
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no time; write it as 3s or 50ms")
    return float(found[1]) * (1e-3 if found[2] == "ms" else 1.0)


count = whole(1)
"""Reads numbers of things."""
_natural = whole(0)


def _positive(text: str) -> Any:
    return number(text, float, lambda value: 0 < value < float("inf"), "a number above 0")


def _speed(text: str) -> float:
    """The factor of times."""
    return float(1 / _positive(text))


def share(text: str) -> Any:
    """Reads a part of all."""
    return number(text, float, lambda value: 0 < value <= 1, "a share, above 0 and at most 1")


def _ratio(text: str) -> Any:
    return number(text, float, lambda value: 1 < value < float("inf"), "a ratio above 1")


def _paths(text: str) -> list[Path]:
    return [Path(part) for part in text.split(",")]


def _id_range(text: str) -> range:
    found = re.fullmatch(r"(\d+):(\d+)", text)
    if found is None or int(found[1]) >= int(found[2]):
        raise argparse.ArgumentTypeError(f"{text!r} is no range of token ids; write it as 128:256")
    return range(int(found[1]), int(found[2]))


def _run(options: argparse.Namespace) -> int:
    from tandem.bench.commands import COMMANDS  # it needs much that `--help` does not

    return COMMANDS[options.subcommand](options)
