"""One load on several clusters of this machine, in turn: each run has a cluster of its own, started for it.

    repetition 1:  0+2  1+1        repetition 2:  1+1  0+2        repetition 3:  0+2  1+1

All runs of a repetition have the same prompts and arrivals. Ctrl-C and SIGTERM end what runs, the cluster among it.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from tandem.advise.clusters import Cluster
from tandem.advise.verdict import RunFigures
from tandem.bench.load.records import Slo
from tandem.bench.load.traces import Cut
from tandem.bench.machine import now
from tandem.bench.other_load import QUIET_CORES, OtherLoad
from tandem.bench.repetitions import rotated
from tandem.bench.report.progress import shown
from tandem.bench.report.results import Run
from tandem.bench.report.tables import remarks
from tandem.bench.server_process import Command, running
from tandem.bench.session import Session, Shape, Target, Workload
from tandem.core.config import Config, to_dict
from tandem.core.errors import ConfigError
from tandem.core.ports import free_port

_QUIET_S = 2.0  # for how long it is measured what others do before a run


@dataclass(frozen=True)
class AdviceRun:
    """One repetition on one cluster. `remarks` are what a reader of the figures must know."""

    cluster: Cluster
    repetition: int
    figures: RunFigures
    remarks: tuple[str, ...] = ()
    about: dict[str, Any] = field(default_factory=dict)  # what else is kept of it

    def as_json(self) -> dict[str, Any]:
        common = {"cluster": str(self.cluster), "repetition": self.repetition, "remarks": list(self.remarks)}
        return {**common, **self.about, "figures": dict(self.figures)}


@dataclass
class Advice:
    """What is measured, and what has been."""

    clusters: Sequence[Cluster]
    num_repetitions: int
    workload: Workload
    shape: Shape
    slo: Slo
    target: Target  # all but its URL
    config: Config  # of the clusters, but for their pools and port
    logs: Path
    runs: list[AdviceRun] = field(default_factory=list)
    cut: Cut | None = None

    def turns(self) -> Iterator[tuple[int, Cluster]]:
        """Repetitions, from 1, and clusters, in their order."""
        for repetition in range(1, self.num_repetitions + 1):
            for cluster in rotated(self.clusters, repetition - 1):
                yield repetition, cluster


async def measure(advice: Advice, console: Console, *, progress: bool = True) -> None:
    """All turns.

    Raises:
        ConfigError: the load does not fit the model.
        TandemError: a cluster did not start, or did not answer.
        KeyboardInterrupt, CancelledError: a signal came; what had been started has ended, and whole runs are kept.
    """
    Session(advice.target, advice.workload).check(advice.shape)
    turns = list(advice.turns())
    began_s = time.monotonic()
    for number, (repetition, cluster) in enumerate(turns):
        left = ""
        if number:
            left = f", about {_minutes((time.monotonic() - began_s) / number * (len(turns) - number))} left"
        if progress:
            console.print(
                f"run {number + 1} of {len(turns)}: {cluster}, repetition {repetition}{left}", highlight=False
            )
        advice.runs.append(await _one(advice, repetition, cluster, console, progress=progress))


async def _one(advice: Advice, repetition: int, cluster: Cluster, console: Console, *, progress: bool) -> AdviceRun:
    # Prompts and arrivals differ between repetitions, and are the same for all clusters.
    workload = dataclasses.replace(advice.workload, seed=advice.workload.seed + repetition - 1)
    with _cancelled_by_signals() as renew:
        others = OtherLoad()
        await asyncio.sleep(_QUIET_S)
        other_cores = others.cores()
        directory = advice.logs / str(cluster)
        command = serve_command(advice.config, cluster, free_port(), directory)
        async with running([command], directory):
            session = Session(dataclasses.replace(advice.target, url=f"http://127.0.0.1:{command.port}"), workload)
            try:
                await session.open()
                with shown(
                    f"{cluster}, repetition {repetition}", len(workload.entries), console=console, is_wanted=progress
                ) as watch:
                    load = await session.measure(advice.shape, watch=watch)
            finally:
                renew()  # the session takes SIGINT for itself
            if session.was_interrupted:
                raise KeyboardInterrupt
    advice.cut = session.cut
    run = Run.of(advice.shape, load, advice.slo)
    said = list(remarks(run))
    if other_cores > QUIET_CORES:
        said.append(f"others used {other_cores:.1f} cores just before")
    found = run.as_json(with_records=False)
    about = {
        "date": now(),
        "seed": workload.seed,
        "other_cores": round(other_cores, 3),
        "generator": found["generator"],
    }
    return AdviceRun(cluster, repetition, found["figures"], tuple(said), about)


def serve_command(config: Config, cluster: Cluster, port: int, directory: Path) -> Command:
    """A `tandem serve` of this cluster; its configuration is written into `directory`. Raises `ConfigError`."""
    path = directory / "tandem.yaml"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(to_dict(config)))  # JSON is YAML
    except OSError as error:
        raise ConfigError(f"the logs cannot be written: {error}", key="--logs") from error
    pools = ("--prefill", str(cluster.num_prefill), "--decode", str(cluster.num_decode))
    argv = (sys.executable, "-m", "tandem.cli", "serve", "--config", str(path), "--port", str(port), *pools)
    return Command("serve", argv, port)


@contextlib.contextmanager
def _cancelled_by_signals() -> Iterator[Callable[[], None]]:
    """Inside, SIGINT and SIGTERM cancel this task; what it gives takes SIGINT back from whoever has taken it."""
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None

    def take() -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, task.cancel)

    take()
    try:
        yield take
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds > 90 else f"{seconds:.0f} s"
