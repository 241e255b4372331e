"""`python -m benchmarks kernels`: from its options to a table and a file."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks.kernels.cases import Sizes, describe
from benchmarks.kernels.measure import DEFAULT_MODEL, count_steps, measure, shape_of, thread_counts
from benchmarks.kernels.prompt_attention import GOAL, PromptRun, PromptSizes, count_prompts, measure_prompts
from benchmarks.kernels.roofline import Figure, Limits, ModelShape, Probe, Report
from benchmarks.kernels.weight_types import WeightRun, WeightSizes, count_weights, measure_weights
from benchmarks.origin import origin
from tandem.bench.machine import machine
from tandem.bench.report import json_file
from tandem.engine.random_model import ModelSpec, save

FORMAT = "tandem-kernels/1"
# Parts of the file that may be measured at another time than the rest.
PROMPT_ATTENTION = "prompt_attention"
WEIGHT_TYPES = "weight_types"

_FILE_WIDTH = 120  # of tables that go to no terminal

_MOST_OTHER_LOAD = 0.1  # of a core

_Run = TypeVar("_Run", PromptRun, WeightRun)

_NOTES = (
    "limit: the longer of bytes / best read probe and operations / best product probe, on these threads",
    "share: the limit / the median run; the probes are other libraries' best, so a share may be above 100 %",
)


def run(
    model: Path | None,
    threads: list[int] | None,
    json: Path | None,
    *,
    progress: bool = True,
    sizes: Sizes | None = None,
    prompt_sizes: PromptSizes | None = None,
    weight_sizes: WeightSizes | None = None,
    random_model: ModelSpec = DEFAULT_MODEL,
) -> None:
    """Measure, print the tables, and write them to `json`.

    Args:
        model: a checkpoint; without one, `random_model` is made for as long as this lasts.
        threads: numbers of threads, each measured by itself; without them, 1 and all.
        prompt_sizes: of the attention of prompts.
        weight_sizes: of the products with each type of weights.

    Raises what `shape_of`, `thread_counts` and `Engine.load` raise.
    """
    sizes, counts = sizes or Sizes(), thread_counts(threads)
    parts: list[_Part[Any]] = [
        _prompts_part(prompt_sizes or PromptSizes()),
        _weights_part(weight_sizes or WeightSizes()),
    ]
    num_steps = 1 + len(counts) * (count_steps(sizes) + sum(part.num_steps for part in parts))
    with (
        _told(num_steps, is_wanted=progress) as tell,
        tempfile.TemporaryDirectory(prefix="tandem-kernels-") as directory,
    ):
        tell("model")
        model_dir = save(random_model, Path(directory)) if model is None else model
        shape = shape_of(model_dir, sizes)
        reports = []
        for num_threads in counts:
            tell_here = functools.partial(tell, threads_title(num_threads))
            reports.append(measure(model_dir, shape, num_threads, sizes, tell_here))
        found = [part.measure_all(counts, tell) for part in parts]
    name = "random" if model is None else model.resolve().name
    _say(name, shape, reports)
    for part, runs in zip(parts, found, strict=True):
        part.say(runs)
    if json is not None:
        whole = document(name, shape, sizes, reports)
        measured = {part.key: part.document(runs) for part, runs in zip(parts, found, strict=True)}
        json_file.write(json, {**whole, **measured})


def run_prompts(
    threads: list[int] | None, json: Path | None, *, progress: bool = True, sizes: PromptSizes | None = None
) -> None:
    """Measure the attention of prompts alone, print its table, and put it into the file of kernels at `json`.

    Raises what `thread_counts` and `read_format` raise.
    """
    _run_part(_prompts_part(sizes or PromptSizes()), threads, json, progress)


def run_weights(
    threads: list[int] | None, json: Path | None, *, progress: bool = True, sizes: WeightSizes | None = None
) -> None:
    """As `run_prompts`: the products with each type of weights alone."""
    _run_part(_weights_part(sizes or WeightSizes()), threads, json, progress)


@dataclass(frozen=True)
class _Part(Generic[_Run]):
    """What needs no model, and may be measured alone.

    Attributes:
        key: its place in the file.
        num_steps: how often `measure` tells what comes next.
        measure: on so many threads.
    """

    key: str
    num_steps: int
    measure: Callable[[int, Callable[[str], None]], Iterable[_Run]]
    table: Callable[[Sequence[_Run]], Table]
    document: Callable[[Sequence[_Run]], dict[str, Any]]

    def measure_all(self, counts: Sequence[int], tell: Callable[..., None]) -> list[_Run]:
        """On each of these numbers of threads."""
        return [
            found
            for num_threads in counts
            for found in self.measure(num_threads, functools.partial(tell, threads_title(num_threads)))
        ]

    def say(self, runs: Sequence[_Run]) -> None:
        """Print the table."""
        console = _console()
        console.print()
        console.print(self.table(runs))
        if (most := max((found.other_load for found in runs), default=0.0)) > _MOST_OTHER_LOAD:
            console.print(f"note: others used up to {most:.1f} cores meanwhile", highlight=False, markup=False)


def _prompts_part(sizes: PromptSizes) -> _Part[PromptRun]:
    return _Part(
        PROMPT_ATTENTION,
        count_prompts(sizes),
        lambda num_threads, tell: measure_prompts(num_threads, sizes, tell),
        prompt_table,
        lambda runs: prompts_document(runs, sizes),
    )


def _weights_part(sizes: WeightSizes) -> _Part[WeightRun]:
    return _Part(
        WEIGHT_TYPES,
        count_weights(),
        lambda num_threads, tell: measure_weights(num_threads, sizes, tell),
        weight_table,
        lambda runs: weights_document(runs, sizes),
    )


def _run_part(part: _Part[Any], threads: list[int] | None, json: Path | None, progress: bool) -> None:
    counts = thread_counts(threads)
    before = None if json is None else json_file.read_format(json, FORMAT, "kernels", key="--json")
    with _told(len(counts) * part.num_steps, is_wanted=progress) as tell:
        runs = part.measure_all(counts, tell)
    part.say(runs)
    if json is not None and before is not None:
        json_file.write(json, {**before, part.key: part.document(runs)})


def _say(name: str, shape: ModelShape, reports: Sequence[Report]) -> None:
    console = _console()
    weights = (shape.layer_weights + shape.head_weights) / 1e6
    console.print(
        f"{machine()['cpu']}; {name} model, {weights:,.1f} M weights in linear layers, float32",
        highlight=False, markup=False,
    )  # fmt: skip
    for report in reports:
        console.print()
        console.print(limit_table(report))
        console.print()
        console.print(kernel_table(report))
    console.print()
    for note in (*_NOTES, describe(shape), *remarks(reports)):
        console.print(f"note: {note}", soft_wrap=True, highlight=False, markup=False)


def _console() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=_FILE_WIDTH)


def remarks(reports: Sequence[Report]) -> Iterator[str]:
    """What a reader of the figures must know."""
    for report in reports:
        if report.other_load > _MOST_OTHER_LOAD:
            threads = threads_title(report.limits.num_threads)
            yield f"{threads}: others used {report.other_load:.1f} cores meanwhile: no figure is reliable"


@contextlib.contextmanager
def _told(total: int, *, is_wanted: bool) -> Iterator[Callable[..., None]]:
    """Inside, what is told moves a bar on standard error, or is a line there if that is no terminal."""
    console = Console(stderr=True)
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    is_shown = is_wanted and console.is_terminal
    # Drawn when something is told only: a thread that draws would be measured too.
    with Progress(*columns, console=console, transient=True, auto_refresh=False, disable=not is_shown) as bar:
        task, num_told = bar.add_task("", total=total), 0

        def tell(*parts: str) -> None:
            nonlocal num_told
            what = ": ".join(parts)
            bar.update(task, completed=num_told, description=what, refresh=True)
            num_told += 1
            if is_wanted and not is_shown:
                console.print(f"{num_told}/{total} {what}", highlight=False, markup=False, soft_wrap=True)

        yield tell


# --- tables -----------------------------------------------------------------------------------------------------------


def limit_table(report: Report) -> Table:
    """The probes; those that set the limits are marked."""
    limits = report.limits
    table = Table(f"{threads_title(limits.num_threads)}: limits", "rate", "", box=None)
    table.columns[1].justify = "right"
    for probes, best, unit in (
        (limits.products, limits.product_rate, "GFLOP/s"),
        (limits.reads, limits.read_rate, "GB/s"),
    ):
        for probe in probes:
            table.add_row(probe.name, _giga(probe.rate, unit), "limit" if probe.rate == best else "")
    own = report.own_product
    table.add_row(own.name, _giga(own.rate, "GFLOP/s"), "no limit: to compare")
    return table


def kernel_table(report: Report) -> Table:
    """The kernels, in the order of measuring."""
    limits = report.limits
    table = Table(
        f"{threads_title(limits.num_threads)}: kernels",
        "median ms",
        "best ms",
        "runs",
        "limit ms",
        "achieved",
        "share",
        "goal",
        box=None,
    )
    table.columns[0].no_wrap = True
    for column in table.columns[1:]:
        column.justify, column.no_wrap = "right", True
    for figure in report.figures:
        goal = "" if figure.goal is None else f"≥ {figure.goal:.0%}"
        unit = "GB/s" if limits.is_memory_bound(figure.work) else "GFLOP/s"
        table.add_row(
            figure.name,
            *(_ms(seconds) for seconds in (figure.timing.median_s, figure.timing.best_s)),
            f"{figure.timing.num_runs:,}",
            _ms(limits.seconds(figure.work)),
            _giga(figure.rate(limits), unit),
            f"{figure.share(limits):.0%}",
            goal,
        )
    return table


def prompt_table(prompts: Sequence[PromptRun]) -> Table:
    """Attention of prompts, in the order of measuring."""
    columns = ("threads", "head", "context", "limit", "achieved", "share", "torch", "share", "goal")
    table = Table(*columns, title="attention of a prompt, GFLOP/s", box=None)
    for column in table.columns:
        column.justify, column.no_wrap = "right", True
    for found in prompts:
        table.add_row(
            str(found.num_threads),
            str(found.head_dim),
            f"{found.context:,}",
            f"{found.limit_flop_per_s / 1e9:,.1f}",
            f"{found.flop_per_s / 1e9:,.1f}",
            f"{found.share:.0%}",
            f"{found.torch_flop_per_s / 1e9:,.1f}",
            f"{found.torch_flop_per_s / found.limit_flop_per_s:.0%}",
            f"≥ {GOAL:.0%}",
        )
    return table


def weight_table(runs: Sequence[WeightRun]) -> Table:
    """Products with each type of weights, in the order of measuring."""
    columns = ("threads", "weights", "rows", "ms", "limit ms", "bound", "share", "of adds", "of reads", "goal")
    table = Table(*columns, title="products by type of weights", box=None)
    for column in table.columns:
        column.justify, column.no_wrap = "right", True
    for found in runs:
        table.add_row(
            str(found.limits.num_threads),
            found.weights,
            f"{found.num_rows:,}",
            _ms(found.seconds),
            _ms(found.limits.seconds(found.work)),
            found.bound,
            f"{found.share:.0%}",
            f"{found.share_of_multiply_adds:.0%}",
            f"{found.share_of_reads:.0%}",
            "" if found.goal is None else f"≥ {found.goal:.0%}",
        )
    return table


def threads_title(number: int) -> str:
    """As a title."""
    return f"{number} thread{'s' if number > 1 else ''}"


def _giga(rate: float, unit: str) -> str:
    return f"{rate / 1e9:,.1f} {unit}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.3f}" if seconds < 1e-2 else f"{seconds * 1e3:,.1f}"


# --- file -------------------------------------------------------------------------------------------------------------


def document(model: str, shape: ModelShape, sizes: Sizes, reports: Sequence[Report]) -> dict[str, Any]:
    """Everything as plain data: seconds, bytes, operations, and each of them a second."""
    return {
        "format": FORMAT,
        **origin(),
        "model": {"name": model, **dataclasses.asdict(shape)},
        "sizes": dataclasses.asdict(sizes),
        "reports": [_plain_report(report) for report in reports],
    }


def prompts_document(prompts: Sequence[PromptRun], sizes: PromptSizes) -> dict[str, Any]:
    """The part of the attention of prompts, which may be measured at another time."""
    runs = [{**dataclasses.asdict(found), "share": found.share} for found in prompts]
    return {**origin(), "sizes": dataclasses.asdict(sizes), "goal": GOAL, "runs": runs}


def weights_document(runs: Sequence[WeightRun], sizes: WeightSizes) -> dict[str, Any]:
    """The part of the products with each type of weights, which may be measured at another time."""
    return {**origin(), "sizes": dataclasses.asdict(sizes), "runs": [_plain_weights(found) for found in runs]}


def _plain_weights(found: WeightRun) -> dict[str, Any]:
    return {
        "num_threads": found.limits.num_threads,
        "weights": found.weights,
        "num_rows": found.num_rows,
        "work": dataclasses.asdict(found.work),
        "seconds": found.seconds,
        "limit_flop_per_s": found.limits.product_rate,
        "limit_bytes_per_s": found.limits.read_rate,
        "bound": found.bound,
        "share": found.share,
        "share_of_multiply_adds": found.share_of_multiply_adds,
        "share_of_reads": found.share_of_reads,
        "goal": found.goal,
        "other_load": found.other_load,
    }


def _plain_report(report: Report) -> dict[str, Any]:
    limits = report.limits
    return {
        "num_threads": limits.num_threads,
        "product_flop_per_s": limits.product_rate,
        "read_bytes_per_s": limits.read_rate,
        "product_probes": _plain_probes(limits.products),
        "read_probes": _plain_probes(limits.reads),
        "other_load": report.other_load,
        "own_product": dataclasses.asdict(report.own_product),
        "kernels": [_plain_figure(figure, limits) for figure in report.figures],
    }


def _plain_probes(probes: Sequence[Probe]) -> list[dict[str, Any]]:
    return [dataclasses.asdict(probe) for probe in probes]


def _plain_figure(figure: Figure, limits: Limits) -> dict[str, Any]:
    return {
        **dataclasses.asdict(figure),
        "bound": "memory" if limits.is_memory_bound(figure.work) else "product",
        "limit_s": limits.seconds(figure.work),
        "share": figure.share(limits),
    }
