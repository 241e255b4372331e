"""`tandem bench advise`."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from router.request.targets import Targets
from tandem.bench.advise.clusters import Cluster, clusters_of
from tandem.bench.advise.measure import Advice, AdviceRun, measure
from tandem.bench.advise.report import document, figure_table, figures_of, notes, plot
from tandem.bench.advise.verdict import Verdict, verdict
from tandem.bench.commands import INTERRUPTED, in_loop, plain_options, workload_of
from tandem.bench.load.records import Slo
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
    clusters = _clusters(options)
    config, slo = _config(options)
    if options.plot is not None:
        new_figure(height=1.0)  # after the measurement would be late to say that there is no matplotlib
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
    found = _told(advice.clusters, advice.runs, slo, options, was_interrupted=was_interrupted)
    if options.json is not None:
        more = {
            "date": now(),
            "was_interrupted": was_interrupted,
            "slo": dataclasses.asdict(slo),
            "cut": None if advice.cut is None else dataclasses.asdict(advice.cut),
            "machine": machine(),
            "versions": versions(),
        }
        json_file.write(options.json, document(plain_options(options), clusters, advice.runs, found, **more))
    return INTERRUPTED if was_interrupted else int(any(each.figures["num_failed"] for each in advice.runs))


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


def _told(
    clusters: Sequence[Cluster],
    runs: Sequence[AdviceRun],
    slo: Slo,
    options: argparse.Namespace,
    *,
    was_interrupted: bool,
) -> Verdict | None:
    """Print what was found, and draw it."""
    console = Console(soft_wrap=True, highlight=False, markup=False)
    found = verdict(figures_of(clusters, runs), options.margin)
    console.print(figure_table(clusters, runs))
    console.print()
    if found is None:
        console.print("No verdict: no repetition has run on all clusters.")
    else:
        console.print("\n".join(found.words))
    for note in notes(clusters, runs, slo):
        console.print(f"note: {note}")
    if was_interrupted:
        console.print("note: partial: it was interrupted")
    if options.plot is not None:
        plot(options.plot, clusters, runs, "no verdict" if found is None else found.words[0])
        console.print(f"plot: {options.plot}")
    return found
