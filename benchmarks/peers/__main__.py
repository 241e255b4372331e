"""Measure Tandem and, where vLLM is installed, vLLM, in turn on the same loads.

    python -m benchmarks.peers                                   Tandem alone, or with PEER_VENV both; 1.5 hours
    python -m benchmarks.peers --peer-venv DIR --loads A B --repetitions 1 --requests 16 --json short.json
    python -m benchmarks.peers --peer-venv DIR --loads --goodput AzureLLMInferenceTrace_conv.csv

Started again, it measures what the file does not hold yet. docs/benchmarking.md says more; `make docs` writes
docs/benchmarks.md from docs/figures/peers.json.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.code import Code
from benchmarks.in_loop import in_loop
from benchmarks.peers.models import CACHE, MODEL_OPTIONS, ROOT, Model
from benchmarks.peers.run import Comparison, compare
from benchmarks.peers.servers import CONTESTANTS, QUANTIZED, Contestant, Place, chosen_contestants
from benchmarks.peers.turns import LOADS, GoodputLoad, Measured, Plan, chosen_loads
from tandem.bench.load.traces import load_trace, scaled
from tandem.bench.machine import machine, versions
from tandem.core.errors import ConfigError, TandemError

#: What of a checkpoint's `config.json` says how much work it is.
_SHAPE_KEYS = (
    "model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "intermediate_size", "vocab_size",
)  # fmt: skip
_INTERRUPTED = 130


def main(arguments: list[str] | None = None) -> int:
    """0, 1 where a request failed or a server did not start, 130 where it was interrupted."""
    options = _parser().parse_args(arguments)
    console = Console(stderr=True)

    def work() -> int:
        comparison = _comparison(options, console)
        num_failed = in_loop(lambda: compare(comparison))
        measured = comparison.measured
        console.print(f"{measured.path} holds {len(measured.runs)} runs", highlight=False, soft_wrap=True)
        if num_failed:
            console.print(f"{num_failed} requests failed", style="red", highlight=False)
        return int(bool(num_failed))

    return told("benchmarks.peers", console, work)


def told(program: str, console: Console, work: Callable[[], int]) -> int:
    """The exit code of `work`; 1 and a line where it fails, 130 and a line where it was interrupted."""
    try:
        return work()
    except TandemError as error:
        console.print(f"{program}: {error.message}", style="red", highlight=False, markup=False, soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        console.print("interrupted; started again it goes on from here", highlight=False)
        return _INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    plan = Plan((), ())
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_argument_group("what is measured")
    servers, loads = [contestant.name for contestant in CONTESTANTS], [load.name for load in LOADS]
    what.add_argument("--servers", nargs="+", default=servers, metavar="NAME",
                      help=f"of {', '.join(servers)} (default: these), "
                           f"{', '.join(each.name for each in QUANTIZED)}")  # fmt: skip
    what.add_argument("--loads", nargs="*", default=loads, metavar="NAME",
                      help=f"of {', '.join(loads)} (default: all)")  # fmt: skip
    what.add_argument("--repetitions", type=int, default=plan.num_repetitions, metavar="N", help="(default: 3)")
    what.add_argument("--requests", type=int, metavar="N", help="of each load (default: 64, of load D 16)")
    what.add_argument("--warmup", type=int, default=plan.num_warm_up, metavar="N",
                      help="requests before each load, not counted (default: 4)")  # fmt: skip
    what.add_argument("--seed", type=int, default=plan.seed, help="of all prompts (default: 1)")
    what.add_argument("--goodput", type=Path, metavar="TRACE",
                      help="also search each server's goodput with this Azure trace, lengths over 8")  # fmt: skip
    what.add_argument("--goodput-requests", type=int, default=GoodputLoad("").num_requests, metavar="N",
                      help="of the trace (default: its first 300)")  # fmt: skip
    where = parser.add_argument_group("with what and where")
    add_place_options(where)
    where.add_argument("--model", type=Path, metavar="DIR",
                       help="a checkpoint (default: a random one of 82 M parameters, made in the cache)")  # fmt: skip
    where.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32",
                       help="of the random checkpoint; a named one says its own (default: float32)")  # fmt: skip
    where.add_argument("--json", type=Path, default=ROOT / "docs/figures/peers.json", metavar="FILE",
                       help="the results (default: docs/figures/peers.json)")  # fmt: skip
    where.add_argument("--fresh", action="store_true", help="measure all anew; what the file holds is lost")
    return parser


def add_place_options(where: Any) -> None:
    """Where the servers are, and what they take."""
    peer_venv = os.environ.get("PEER_VENV")
    where.add_argument("--peer-venv", type=Path, default=Path(peer_venv) if peer_venv else None, metavar="DIR",
                       help="where vLLM is installed (default: PEER_VENV)")  # fmt: skip
    where.add_argument("--port", type=int, default=8460, metavar="N",
                       help="of the servers; the peer takes some of the next 12 too (default: 8460)")  # fmt: skip
    where.add_argument("--logs", type=Path, default=CACHE / "bench", metavar="DIR",
                       help="of the servers (default: ~/.cache/tandem/bench)")  # fmt: skip


def place_of(options: argparse.Namespace, model: Path, dtype: str) -> Place:
    """By those options."""
    return Place(
        model=model.resolve(),
        port=options.port,
        dtype=dtype,
        cores=sorted(os.sched_getaffinity(0)),
        directory=options.logs.resolve(),
        peer_venv=options.peer_venv,
        split_router=Path(__file__).with_name("split_router.py"),
    )


def _comparison(options: argparse.Namespace, console: Console) -> Comparison:
    contestants, messages = chosen_contestants(options.servers, options.peer_venv, [*CONTESTANTS, *QUANTIZED])
    for name in ("repetitions", "requests", "goodput_requests"):
        if getattr(options, name) is not None and getattr(options, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} is at least 1")
    goodput = None
    if options.goodput is not None:
        goodput = GoodputLoad(options.goodput.name, num_requests=options.goodput_requests)
    plan = Plan(
        contestants=tuple(contestant.name for contestant in contestants),
        loads=chosen_loads(options.loads, options.requests),
        num_repetitions=options.repetitions,
        seed=options.seed,
        num_warm_up=options.warmup,
        goodput=goodput,
    )
    entries = [] if goodput is None else load_trace(options.goodput, "azure", limit=goodput.num_requests)
    trace = scaled(entries, lengths=goodput.scale_lengths) if goodput else []
    if options.model is None:
        model = Model.random(console, "82m", MODEL_OPTIONS, options.dtype)
    else:
        model = Model.of(options.model)
    settings = settings_of(plan, model.directory, contestants, options.peer_venv)
    code = Code.of()
    ours = {contestant.name: code.digest for contestant in contestants if not contestant.is_peer}
    measured = Measured.opened(options.json, settings, digests=ours, is_fresh=options.fresh)
    if measured.num_outdated:
        messages.append(f"{measured.num_outdated} runs were of other code of Tandem and are measured anew")
    for message in messages:
        console.print(message, highlight=False, soft_wrap=True)
    place = place_of(options, model.directory, settings["dtype"])
    return Comparison(plan, place, contestants, model.vocabulary, trace, measured, console, code)


def settings_of(plan: Plan, model: Path, contestants: Sequence[Contestant], peer_venv: Path | None) -> dict[str, Any]:
    """What must be equal for figures to compare, and where they were measured."""
    config = json.loads((model / "config.json").read_text())
    settings: dict[str, Any] = {
        "machine": machine(),
        "versions": versions(),
        "model": {key: config[key] for key in _SHAPE_KEYS if key in config},
        "dtype": str(config.get("dtype", "float32")),
        "seed": plan.seed,
        "num_warm_up": plan.num_warm_up,
        "loads": {load.name: load.settings() for load in plan.loads},
    }
    if peer_venv is not None and any(contestant.is_peer for contestant in contestants):
        settings["peer_versions"] = _peer_versions(peer_venv)
    if plan.goodput is not None:
        settings["goodput"] = plan.goodput.settings()
    return settings


def _peer_versions(venv: Path) -> dict[str, str]:
    program = (
        "import json; from importlib.metadata import distributions as all\n"
        "found = {d.name: d.version for d in all() if d.name in ('vllm', 'torch', 'nixl-cu12')}\n"
        "print(json.dumps(dict(sorted(found.items()))))"
    )
    answer = subprocess.run([venv / "bin/python", "-c", program], check=True, capture_output=True, text=True)
    found: dict[str, str] = json.loads(answer.stdout)
    return found


if __name__ == "__main__":
    sys.exit(main())
