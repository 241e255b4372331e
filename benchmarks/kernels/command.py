"""`python -m benchmarks kernels`: from its options to a table and a file."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks.kernels.cases import Sizes, describe
from benchmarks.kernels.measure import DEFAULT_MODEL, count_steps, measure, shape_of, thread_counts
from benchmarks.kernels.prompt_attention import GOAL, PromptRun, PromptSizes, count_prompts, measure_prompts
from benchmarks.kernels.roofline import Figure, Limits, ModelShape, Probe, Report
from benchmarks.origin import origin
from tandem.bench.machine import machine
from tandem.bench.report import json_file
from tandem.engine.random_model import ModelSpec, save

FORMAT = "tandem-kernels/1"
PROMPT_ATTENTION = "prompt_attention"

_FILE_WIDTH = 120  # of tables that go to no terminal

_MOST_OTHER_LOAD = 0.1  # of a core

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
    random_model: ModelSpec = DEFAULT_MODEL,
) -> None:
    """Measure, print the tables, and write them to `json`.

    Args:
        model: a checkpoint; without one, `random_model` is made for as long as this lasts.
        threads: numbers of threads, each measured by itself; without them, 1 and all.
        prompt_sizes: of the attention of prompts.

    Raises what `shape_of`, `thread_counts` and `Engine.load` raise.
    """
    sizes, counts, prompt_sizes = sizes or Sizes(), thread_counts(threads), prompt_sizes or PromptSizes()
    num_prompts = len(counts) * count_prompts(prompt_sizes)
    with (
        _told(1 + len(counts) * count_steps(sizes) + num_prompts, is_wanted=progress) as tell,
        tempfile.TemporaryDirectory(prefix="tandem-kernels-") as directory,
    ):
        tell("model")
        model_dir = save(random_model, Path(directory)) if model is None else model
        shape = shape_of(model_dir, sizes)
        reports = []
        for num_threads in counts:
            tell_here = functools.partial(tell, threads_title(num_threads))
            reports.append(measure(model_dir, shape, num_threads, sizes, tell_here))
        prompts = _measure_prompts(counts, prompt_sizes, tell)
    name = "random" if model is None else model.resolve().name
    _say(name, shape, reports)
    _say_prompts(prompts)
    if json is not None:
        whole = document(name, shape, sizes, reports)
        json_file.write(json, {**whole, PROMPT_ATTENTION: prompts_document(prompts, prompt_sizes)})


def run_prompts(
    threads: list[int] | None, json: Path | None, *, progress: bool = True, sizes: PromptSizes | None = None
) -> None:
    """Measure the attention of prompts alone, print its table, and put it into the file of kernels at `json`.

    Raises what `thread_counts` and `read_format` raise.
    """
    sizes, counts = sizes or PromptSizes(), thread_counts(threads)
    before = None if json is None else json_file.read_format(json, FORMAT, "kernels", key="--json")
    with _told(len(counts) * count_prompts(sizes), is_wanted=progress) as tell:
        prompts = _measure_prompts(counts, sizes, tell)
    _say_prompts(prompts)
    if json is not None and before is not None:
        json_file.write(json, {**before, PROMPT_ATTENTION: prompts_document(prompts, sizes)})


def _measure_prompts(counts: Sequence[int], sizes: PromptSizes, tell: Callable[..., None]) -> list[PromptRun]:
    return [
        measured
        for num_threads in counts
        for measured in measure_prompts(num_threads, sizes, functools.partial(tell, threads_title(num_threads)))
    ]


def _say(name: str, shape: ModelShape, reports: Sequence[Report]) -> None:
    console = Console()
    if not console.is_terminal:
        console = Console(width=_FILE_WIDTH)
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


def _say_prompts(prompts: Sequence[PromptRun]) -> None:
    console = Console()
    console.print()
    console.print(prompt_table(prompts))
    if (most := max(found.other_load for found in prompts)) > _MOST_OTHER_LOAD:
        console.print(f"note: others used up to {most:.1f} cores meanwhile", highlight=False, markup=False)


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
