"""`tandem bench advise`."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.progress import track

from router.request.targets import Targets
from tandem.advise.clusters import Cluster, clusters_of
from tandem.advise.measure import Advice, AdviceRun, measure
from tandem.advise.report import document, figure_table, figures_of, notes, plot
from tandem.advise.simulate import Simulation
from tandem.advise.verdict import Verdict, verdict
from tandem.bench.commands import INTERRUPTED, in_loop, plain_options, workload_of
from tandem.bench.load.records import Slo
from tandem.bench.load.traces import Cut
from tandem.bench.machine import machine, now, versions
from tandem.bench.report import json_file
from tandem.bench.report.plot import new_figure
from tandem.bench.session import Shape, Target
from tandem.core.config import Config, load
from tandem.core.errors import ConfigError


def run(options: argparse.Namespace) -> int:
    """0, 1 where a request failed, 130 where it was interrupted: what was measured till then is told.

    Raises:
        ConfigError: an option, the trace or the configuration is wrong.
        TandemError: a cluster did not start, or did not answer.
    """
    json_file.check_before(options.json)
    json_file.check_before(options.plot, "--plot")
    if options.plot is not None:
        new_figure(height=1.0)  # after the measurement would be late to say that there is no matplotlib
    return _simulated(options) if options.simulate is not None else _measured(options)


def _measured(options: argparse.Namespace) -> int:
    clusters = _clusters(options)
    config, slo = _config(options)
    advice = Advice(
        clusters=clusters,
        num_repetitions=options.repetitions,
        workload=workload_of(options),
        shape=Shape(concurrency=options.concurrency, rate=options.rate),
        slo=slo,
        target=Target(
            "", ignore_eos=options.ignore_eos, timeout_s=options.timeout, max_sockets=options.max_connections
        ),
        config=config,
        logs=options.logs.expanduser(),
    )
    was_interrupted = False
    try:
        in_loop(measure(advice, Console(stderr=True), progress=options.progress))
    except (KeyboardInterrupt, asyncio.CancelledError):
        was_interrupted = True
    if not advice.runs:
        raise KeyboardInterrupt
    found = verdict(figures_of(clusters, advice.runs), options.margin)
    _tell(clusters, advice.runs, slo, found, was_interrupted=was_interrupted)
    _write(options, clusters, advice.runs, slo, found, advice.cut, was_interrupted=was_interrupted)
    _plot(options, clusters, advice.runs, found)
    return INTERRUPTED if was_interrupted else int(any(each.figures["num_failed"] for each in advice.runs))


def _simulated(options: argparse.Namespace) -> int:
    for name in ("model", "config"):
        if getattr(options, name) is not None:
            raise ConfigError(f"--{name} does not go with --simulate: the scenario has it", key=f"--{name}")
    clusters = _clusters(options)
    simulation = Simulation.of(
        options.simulate,
        workload_of(options),
        Shape(concurrency=options.concurrency, rate=options.rate),
        Slo(options.slo_ttft, options.slo_tpot),
    )
    turns = [(number, each) for number in range(1, options.repetitions + 1) for each in clusters]
    if simulation.is_exact:
        turns = turns[: len(clusters)]
    runs = [
        simulation.run(cluster, number)
        for number, cluster in track(turns, "simulating", console=Console(stderr=True), disable=not options.progress)
    ]
    found = verdict(figures_of(clusters, runs), options.margin, is_exact=simulation.is_exact)
    _tell(clusters, runs, simulation.slo, found)
    print(f"note: simulated with the times of {options.simulate}: trust no difference that is as small as their error")
    _write(options, clusters, runs, simulation.slo, found, simulation.cut)
    _plot(options, clusters, runs, found)
    return int(any(each.figures["num_failed"] for each in runs))


def _clusters(options: argparse.Namespace) -> tuple[Cluster, ...]:
    """The colocated one first."""
    if options.clusters is None:
        return clusters_of(options.workers)
    clusters = sorted(dict.fromkeys(Cluster(*sizes) for sizes in options.clusters))
    if len(clusters) < 2 or not clusters[0].is_colocated or clusters[1].is_colocated:
        raise ConfigError("name one colocated cluster (such as 0+2) and a split or more", key="--clusters")
    return tuple(clusters)


def _config(options: argparse.Namespace) -> tuple[Config, Slo]:
    """The clusters are told the targets by which they are judged. Raises `ConfigError`."""
    given: dict[str, Any] = {
        "model.path": options.model,
        "slo.ttft_ms": None if options.slo_ttft is None else options.slo_ttft * 1e3,
        "slo.tpot_ms": None if options.slo_tpot is None else options.slo_tpot * 1e3,
    }
    config = load(options.config, {key: value for key, value in given.items() if value is not None})
    targets = Targets.of(config)
    return config, Slo(targets.ttft_s, targets.tpot_s)


def _tell(
    clusters: Sequence[Cluster],
    runs: Sequence[AdviceRun],
    slo: Slo,
    found: Verdict | None,
    *,
    was_interrupted: bool = False,
) -> None:
    """Print what was found."""
    console = Console(soft_wrap=True, highlight=False, markup=False)
    console.print(figure_table(clusters, runs))
    console.print()
    console.print("No verdict: no repetition has run on all clusters." if found is None else "\n".join(found.words))
    for note in notes(clusters, runs, slo):
        console.print(f"note: {note}")
    if was_interrupted:
        console.print("note: partial: it was interrupted")


def _write(
    options: argparse.Namespace,
    clusters: Sequence[Cluster],
    runs: Sequence[AdviceRun],
    slo: Slo,
    found: Verdict | None,
    cut: Cut | None,
    *,
    was_interrupted: bool = False,
) -> None:
    """To the file of `--json`, where there is one."""
    if options.json is None:
        return
    more = {
        "date": now(),
        "was_interrupted": was_interrupted,
        "slo": dataclasses.asdict(slo),
        "cut": None if cut is None else dataclasses.asdict(cut),
        "machine": machine(),
        "versions": versions(),
    }
    json_file.write(options.json, document(plain_options(options), clusters, runs, found, **more))


def _plot(
    options: argparse.Namespace, clusters: Sequence[Cluster], runs: Sequence[AdviceRun], found: Verdict | None
) -> None:
    """Draw what was found, if that is asked for; at last: where it cannot be written, all else is kept."""
    if options.plot is None:
        return
    plot(options.plot, clusters, runs, "no verdict" if found is None else found.words[0])
    print(f"plot: {options.plot}")
