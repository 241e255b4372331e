"""`python -m benchmarks kernels | host | parts | …`: for those who work on Tandem; `--help` lists all."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from tandem.cli import add_command, run
from tandem.core.arguments import Parser, port, whole

#: What `parts` can measure.
PARTS = ("exposed", "bandwidth", "admission", "ttft", "streaming", "routers", "placement", "idle", "startup")

#: Of clusters that `autoscale` simulates.
AUTOSCALE_WORKERS = (8, 32, 128, 256)

#: What `scale` can measure.
SCALE_PARTS = ("growth", "thousand", "azure")

#: What `studies` can simulate.
STUDIES = (
    "batching", "memory", "page_size", "chunk_size", "split", "mixed_pool", "link", "slow_link", "worker_dies",
    "several_routers",
)  # fmt: skip

#: What `paper` can compare.
PAPER_SCENARIOS = ("iso-power", "iso-cost", "iso-throughput", "wrong-workload", "batch")
PAPER_SYSTEMS = ("splitwise", "tandem", "tandem-on-profile")


#: Models that `predict` knows.
PREDICT_MODELS = ("embedded", "82m", "simulated")


def main(arguments: list[str] | None = None) -> int:
    """Run one measurement; the exit code as `tandem`'s."""
    options = make_parser().parse_args(arguments)
    return run("benchmarks", options)


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m benchmarks",
        description="Measure kernels, single parts of the system, or one GPU, beside what they could do.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    _add_kernels(commands)
    _add_host(commands)
    _add_parts(commands)
    _add_placement(commands)
    _add_autoscale(commands)
    _add_law(commands)
    _add_studies(commands)
    _add_scale(commands)
    _add_paper(commands)
    _add_conversations(commands)
    _add_simulated(commands)
    _add_predict(commands)
    _add_accuracy(commands)
    _add_speculation(commands)
    _add_link(commands)
    _add_gpu(commands)
    return parser


def _add_kernels(commands: Any) -> None:
    command = add_command(
        commands,
        "kernels",
        "measure the engine's kernels against what this machine's threads can do; no server; some minutes",
        "python -m benchmarks kernels\n"
        "python -m benchmarks kernels --threads 2 --json kernels.json\n"
        "python -m benchmarks kernels --model ~/models/llama-1b --threads 1 4 8\n"
        "python -m benchmarks kernels --prompts --json kernels.json  # those alone, into what is there\n"
        "python -m benchmarks kernels --weights --json kernels.json  # as --prompts",
        _kernels,
    )
    command.add_argument(
        "--model",
        type=Path,
        metavar="DIR",
        help="a checkpoint (default: a random Llama of 82 M weights, made for this)",
    )
    command.add_argument(
        "--threads",
        type=whole(1),
        nargs="+",
        metavar="N",
        help="numbers of threads, one after the other (default: 1 and all)",
    )
    alone = command.add_mutually_exclusive_group()
    alone.add_argument("--prompts", action="store_true", help="the attention of prompts alone, which needs no model")
    alone.add_argument("--weights", action="store_true", help="products with each type of weights alone; no model")
    _add_json(command)
    command.add_argument("--no-progress", dest="progress", action="store_false", help="do not tell what is measured")


def _add_host(commands: Any) -> None:
    command = add_command(
        commands,
        "host",
        "measure what a step costs beside the model: sampling, bookkeeping, events; no model; a minute, 2 GB",
        "python -m benchmarks host\npython -m benchmarks host --json docs/figures/host.json",
        _host,
    )
    _add_json(command)


def _add_parts(commands: Any) -> None:
    command = add_command(
        commands,
        "parts",
        "measure single parts of the system against their goals: transfer, admission, router, idle, start; 4 minutes",
        "python -m benchmarks parts --json parts.json\n"
        "python -m benchmarks parts --only ttft streaming\n"
        "python -m benchmarks parts --only exposed bandwidth --model ~/models/llama-1b --transport nccl",
        _parts,
    )
    command.add_argument(
        "--only",
        nargs="+",
        choices=PARTS,
        metavar="NAME",
        help=f"measure these alone: {', '.join(PARTS)} (default: all)",
    )
    command.add_argument(
        "--model",
        type=Path,
        metavar="DIR",
        help="checkpoint of exposed, bandwidth and admission (default: a random Llama of 82 M weights)",
    )
    command.add_argument(
        "--transport", choices=("ucx", "nccl"), help="of the handoffs (default: ucx where it is installed)"
    )
    _add_json(command)


def _add_placement(commands: Any) -> None:
    command = add_command(
        commands,
        "placement",
        "how much longer requests queue where several routers place them than where one does; simulated; minutes",
        "python -m benchmarks placement\npython -m benchmarks placement --json docs/figures/placement.json",
        _placement,
    )
    _add_json(command)


def _add_autoscale(commands: Any) -> None:
    command = add_command(
        commands,
        "autoscale",
        "laws that size pools by their load beside fixed sizes, on Azure's traces; simulated; a quarter of an hour",
        "python -m benchmarks autoscale --traces ~/traces --json docs/figures/autoscale.json\n"
        "python -m benchmarks autoscale --traces ~/traces --workers 8 32\n"
        "python -m benchmarks autoscale --live --json docs/figures/autoscale_live.json",
        _autoscale,
    )
    what = command.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--traces", type=Path, metavar="DIR",
        help="with AzureLLMInferenceTrace_conv.csv and AzureLLMInferenceTrace_code.csv",
    )  # fmt: skip
    what.add_argument(
        "--live", action="store_true",
        help="a real cluster instead, on nodes that Ray's autoscaler brings and takes, beside its simulation",
    )  # fmt: skip
    command.add_argument(
        "--workers", type=int, nargs="+", choices=AUTOSCALE_WORKERS, metavar="N",
        help=f"clusters of so many at most alone: {', '.join(map(str, AUTOSCALE_WORKERS))} (default: all)",
    )  # fmt: skip
    command.add_argument(
        "--go-on", action="store_true", help="do not simulate again what the file has of these sources"
    )
    command.add_argument("--processes", type=whole(1), metavar="N", help="at once (default: 1)")
    _add_json(command, "write everything there; of sizes that are not simulated what it has stays, of --live nothing")


def _add_law(commands: Any) -> None:
    command = add_command(
        commands,
        "law",
        "where prompts are computed and in which chunks, beside the best constants of each load; simulated; minutes",
        "python -m benchmarks law --json docs/figures/law.json",
        _law,
    )
    _add_json(command)


def _add_studies(commands: Any) -> None:
    command = add_command(
        commands,
        "studies",
        "one setting at a time: batches, memory, chunks, splits, links; simulated; some minutes",
        "python -m benchmarks studies --json docs/figures/studies.json\n"
        "python -m benchmarks studies --only batching memory",
        _studies,
    )
    command.add_argument(
        "--only", nargs="+", choices=STUDIES, metavar="NAME",
        help=f"these alone: {', '.join(STUDIES)} (default: all)",
    )  # fmt: skip
    _add_json(command, "write everything there; other studies stay")


def _add_scale(commands: Any) -> None:
    command = add_command(
        commands,
        "scale",
        "how large a cluster the simulator holds, and what grows with its workers; the whole takes long",
        "python -m benchmarks scale --traces ~/traces --json docs/figures/scale.json\n"
        "python -m benchmarks scale --only thousand --seconds 10",
        _scale,
    )
    command.add_argument(
        "--only", nargs="+", choices=SCALE_PARTS, metavar="NAME",
        help=f"measure these alone: {', '.join(SCALE_PARTS)} (default: all)",
    )  # fmt: skip
    command.add_argument(
        "--seconds", type=whole(1), default=60, metavar="S", help="of the load on 1,024 workers (default: 60)"
    )
    command.add_argument(
        "--traces", type=Path, metavar="DIR", help="with AzureLLMInferenceTrace_conv.csv (default: here)"
    )
    _add_json(command, "write everything there; other parts stay")


def _add_paper(commands: Any) -> None:
    command = add_command(
        commands,
        "paper",
        "the comparisons of clusters in Splitwise's paper, with its policies and with ours; simulated; half an hour",
        "python -m benchmarks paper --traces ~/traces --profile perf_model.csv --json docs/figures/paper.json\n"
        "python -m benchmarks paper --traces ~/traces --only iso-power --quick",
        _paper,
    )
    command.add_argument(
        "--traces", type=Path, required=True, metavar="DIR",
        help="with AzureLLMInferenceTrace_conv.csv and AzureLLMInferenceTrace_code.csv",
    )  # fmt: skip
    command.add_argument(
        "--profile", type=Path, metavar="FILE", help="Splitwise's profile (default: DIR/../splitwise/perf_model.csv)"
    )
    command.add_argument(
        "--only", nargs="+", choices=PAPER_SCENARIOS, metavar="NAME", default=PAPER_SCENARIOS,
        help=f"these alone: {', '.join(PAPER_SCENARIOS)} (default: all)",
    )  # fmt: skip
    command.add_argument(
        "--systems", nargs="+", choices=PAPER_SYSTEMS, metavar="NAME", default=PAPER_SYSTEMS,
        help=f"with these alone: {', '.join(PAPER_SYSTEMS)} (default: all)",
    )  # fmt: skip
    command.add_argument("--go-on", action="store_true", help="do not simulate again what the file has")
    command.add_argument("--processes", type=whole(1), default=2, metavar="N", help="at once (default: 2)")
    command.add_argument("--quick", action="store_true", help="seconds of load and few rates, to see that it runs")
    _add_json(command, "write everything there; what else it has stays")


def _add_conversations(commands: Any) -> None:
    command = add_command(
        commands,
        "conversations",
        "conversations of 6 turns on real workers, placed by the prefixes that these hold and by load alone; minutes",
        "python -m benchmarks conversations --json docs/figures/conversations.json\n"
        "python -m benchmarks conversations --workers 2 --conversations 8 --repetitions 1",
        _conversations,
    )
    command.add_argument(
        "--workers", type=whole(1), default=4, metavar="N", help="prefill workers, and decode workers (default: 4)"
    )
    command.add_argument(
        "--conversations", type=whole(1), default=32, metavar="N", help="in each repetition (default: 32)"
    )
    command.add_argument("--repetitions", type=whole(1), default=3, metavar="N", help="of each way (default: 3)")
    command.add_argument("--transport", choices=("ucx", "nccl"), default="ucx", help="of the handoffs (default: ucx)")
    _add_json(command)


def _add_simulated(commands: Any) -> None:
    command = add_command(
        commands,
        "simulated",
        "what routers and workers cost beside their model: real clusters whose steps only take time; minutes",
        "python -m benchmarks simulated --json docs/figures/simulated.json\n"
        "python -m benchmarks simulated --clusters 4 --seqs 16",
        _simulated,
    )
    command.add_argument(
        "--clusters", type=whole(1), nargs="+", default=(1, 2, 4, 8), metavar="N",
        help="workers of each role, one cluster after the other (default: 1 2 4 8)",
    )  # fmt: skip
    command.add_argument(
        "--seqs", type=whole(1), default=64, metavar="N", help="requests at once for a decode worker (default: 64)"
    )
    _add_json(command)


def _add_predict(commands: Any) -> None:
    command = add_command(
        commands,
        "predict",
        "what simulations say of real clusters on this host, which they are fitted to; minutes",
        "python -m benchmarks predict --json docs/figures/predict.json\n"
        "python -m benchmarks predict --only simulated --repetitions 1 --plot predict.svg",
        _predict,
    )
    command.add_argument(
        "--only", nargs="+", choices=PREDICT_MODELS, metavar="NAME",
        help=f"these models alone: {', '.join(PREDICT_MODELS)} (default: all)",
    )  # fmt: skip
    command.add_argument(
        "--repetitions", type=whole(1), default=5, metavar="N", help="of each predicted load (default: 5)"
    )
    _add_json(command, "write everything there; other models stay")
    command.add_argument(
        "--plot", type=Path, metavar="FILE.svg", help="draw there each run and its simulation over time"
    )


def _add_accuracy(commands: Any) -> None:
    command = add_command(
        commands,
        "accuracy",
        "what bfloat16, int8 and int4 do to the embedded model's answers; no server; minutes",
        "python -m benchmarks accuracy\npython -m benchmarks accuracy --json docs/figures/accuracy.json",
        _accuracy,
    )
    command.add_argument("--texts", type=whole(1), default=20, metavar="N", help="stories (default: 20)")
    command.add_argument("--recalls", type=whole(1), default=100, metavar="N", help="prompts (default: 100)")
    _add_json(command)


def _add_speculation(commands: Any) -> None:
    command = add_command(
        commands,
        "speculation",
        "tokens a second with guesses from lookup and from a draft, and without; no router; a quarter of an hour",
        "python -m benchmarks speculation --json docs/figures/speculation.json\n"
        "python -m benchmarks speculation --model ~/models/llama-3b --draft ~/models/llama-1b --rounds 2",
        _speculation,
    )
    command.add_argument("--model", type=Path, metavar="DIR", help="(default: a random Llama of 82 M weights)")
    command.add_argument("--draft", default="", metavar="DIR", help="the draft's checkpoint (default: the model's own)")
    command.add_argument("--quantize", default="int8", help="how the draft's weights are rounded (default: int8)")
    command.add_argument("--tokens", type=whole(1), default=4, help="speculation.draft_tokens (default: 4)")
    command.add_argument("--rounds", type=whole(1), default=8, help="of each load (default: 8)")
    command.add_argument("--output", type=whole(1), default=400, help="tokens of each request (default: 400)")
    command.add_argument("--threads", type=whole(1), default=1, help="of each worker (default: 1)")
    _add_json(command)


def _add_link(commands: Any) -> None:
    command = add_command(
        commands,
        "link",
        "measure what the network between two hosts carries: a TCP stream, raw writes, handoffs without a model",
        "export TANDEM_LINK_SECRET=...                              # the same on both hosts\n"
        "python -m benchmarks link --listen 10.0.0.2                # on one\n"
        "python -m benchmarks link --to 10.0.0.2 --tokens 512 4096 --json link.json",
        _link,
    )
    side = command.add_mutually_exclusive_group(required=True)
    side.add_argument("--listen", metavar="ADDRESS", help="be the receiver, at this address of this host, for ever")
    side.add_argument("--to", metavar="ADDRESS", help="measure, to the receiver there")
    command.add_argument("--port", type=port, default=7799, metavar="PORT", help="of the receiver (default: 7799)")
    command.add_argument("--transport", choices=("ucx", "nccl"), default="ucx", help="of the pages (default: ucx)")
    command.add_argument(
        "--layouts", nargs="+", choices=("82m", "8b"), default=["82m", "8b"], help="shapes of pages (default: both)"
    )
    command.add_argument(
        "--tokens", type=whole(1), nargs="+", default=[512, 4096, 32768], metavar="N", help="lengths of prompts"
    )
    command.add_argument(
        "--prefill-rate",
        type=float,
        default=10_000.0,
        metavar="TOKENS_PER_S",
        help="how fast prompts are computed where the exposed transfer is measured (default: 10000)",
    )
    command.add_argument("--runs", type=whole(1), default=5, metavar="N", help="of each (default: 5)")
    command.add_argument("--link", default="", metavar="NAME", help="name of this link in the file")
    _add_json(command, "add everything there")


def _add_gpu(commands: Any) -> None:
    command = add_command(
        commands,
        "gpu",
        "measure prefill and decode on one GPU against its own limits; random weights, no server; some minutes",
        "python -m benchmarks gpu\npython -m benchmarks gpu --device cuda:1 --models 8b --json gpu.json",
        _gpu,
    )
    command.add_argument(
        "--device", default="cuda", metavar="DEVICE", help="cuda, cuda:N, or cpu, to see that it runs (default: cuda)"
    )
    command.add_argument(
        "--models",
        nargs="+",
        choices=("8b", "1b", "tiny"),
        default=["8b", "1b"],
        help="Llama shapes (default: 8b and 1b)",
    )
    _add_json(command)


def _add_json(command: argparse.ArgumentParser, what: str = "write everything there") -> None:
    command.add_argument("--json", type=Path, metavar="FILE", help=what)


# --- what they run: imports stand inside ------------------------------------------------------------------------------


def _kernels(options: argparse.Namespace) -> int:
    # As workers have it, before torch is loaded: its threads would spin for a while behind each of its own runs, on the
    # cores that the next one is measured on.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    from benchmarks.kernels import command

    if options.prompts:
        command.run_prompts(options.threads, options.json, progress=options.progress)
    elif options.weights:
        command.run_weights(options.threads, options.json, progress=options.progress)
    else:
        command.run(options.model, options.threads, options.json, progress=options.progress)
    return 0


def _host(options: argparse.Namespace) -> int:
    from benchmarks.host import command
    from tandem.core import garbage

    garbage.settle()  # as a worker does when it is ready
    command.run(options.json)
    return 0


def _parts(options: argparse.Namespace) -> int:
    # Read when gRPC is imported. Its handlers at forks write to the terminal, and our children only ever exec.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    from benchmarks.parts import command

    command.run(options.model, options.transport, options.only, options.json)
    return 0


def _autoscale(options: argparse.Namespace) -> int:
    from benchmarks.autoscale import command, live
    from tandem.core.errors import ConfigError

    if options.live:
        for name in ("workers", "go_on", "processes"):
            if getattr(options, name):
                option = f"--{name.replace('_', '-')}"
                raise ConfigError(f"{option} is for --traces: leave it out with --live", key=option)
        live.run(options.json)
        return 0
    command.run(options.traces, options.json, options.workers or (), options.processes or 1, goes_on=options.go_on)
    return 0


def _law(options: argparse.Namespace) -> int:
    from benchmarks.law import command

    command.run(options.json)
    return 0


def _studies(options: argparse.Namespace) -> int:
    from benchmarks.studies import command

    command.run(options.json, options.only or ())
    return 0


def _scale(options: argparse.Namespace) -> int:
    from benchmarks.scale import command

    sizes = command.ScaleSizes(thousand_s=options.seconds)
    command.run(options.traces, tuple(options.only or SCALE_PARTS), options.json, sizes)
    return 0


def _paper(options: argparse.Namespace) -> int:
    from benchmarks.paper import cases, command

    profile = options.profile or options.traces / ".." / "splitwise" / "perf_model.csv"
    bench = cases.Bench(cases.QUICK if options.quick else cases.PaperSizes(), options.traces, profile)
    wanted = command.Wanted(options.only, options.systems, options.go_on)
    command.run(bench, wanted, options.json, options.processes)
    return 0


def _placement(options: argparse.Namespace) -> int:
    from benchmarks.placement import command

    command.run(options.json)
    return 0


def _conversations(options: argparse.Namespace) -> int:
    from benchmarks.conversations import command

    command.run(options.json, command.sizes(options))
    return 0


def _simulated(options: argparse.Namespace) -> int:
    from benchmarks.simulated import command

    command.run(options.json, command.SimulatedSizes(clusters=tuple(options.clusters), num_seqs=options.seqs))
    return 0


def _predict(options: argparse.Namespace) -> int:
    from benchmarks.predict import command

    command.run(options.json, options.plot, options.only or PREDICT_MODELS, options.repetitions)
    return 0


def _speculation(options: argparse.Namespace) -> int:
    from benchmarks.speculation import command

    sizes = command.Sizes(
        options.rounds, options.output, options.threads, draft_tokens=options.tokens, quantize=options.quantize
    )
    command.run(options.json, sizes, model=options.model, draft=options.draft)
    return 0


def _accuracy(options: argparse.Namespace) -> int:
    from benchmarks.accuracy import command

    command.run(options.json, command.AccuracySizes(options.texts, options.recalls))
    return 0


def _link(options: argparse.Namespace) -> int:
    from benchmarks.link import command

    return command.run(options)


def _gpu(options: argparse.Namespace) -> int:
    from benchmarks.gpu import command

    return command.run(options)


if __name__ == "__main__":
    sys.exit(main())
