"""One measuring session against one server: connect, warm up, measure, once or at many rates."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from tandem.bench.http_client import LoadClient
from tandem.bench.load import Load, LoadDriver
from tandem.bench.records import RequestRecord, Slo
from tandem.bench.server import ServedModel, api_key, connected
from tandem.bench.traces import TraceEntry
from tandem.bench.workload import Job, body_of, make_jobs, poisson_arrivals, warm_up_jobs
from tandem.core.errors import ConfigError, TandemError

_WARM_UP_CONCURRENCY = 4


@dataclass(frozen=True)
class Target:
    """Which server, and how it is asked."""

    url: str
    model: str | None = None
    ignore_eos: bool = True
    timeout_s: float = 600.0
    max_sockets: int = 4096


@dataclass(frozen=True)
class Workload:
    """What it is asked."""

    entries: Sequence[TraceEntry]
    vocabulary: Sequence[int]
    seed: int = 1
    num_warm_up: int = 2


@dataclass(frozen=True)
class Shape:
    """When it is asked: exactly one of a closed loop, Poisson arrivals, or the trace's own times."""

    concurrency: int | None = None
    rate: float | None = None

    @property
    def name(self) -> str:
        return "closed" if self.concurrency else "poisson" if self.rate else "trace"


#: Hears of each record; says whether the run goes on.
Watcher = Callable[[RequestRecord], bool]


class Session:
    """Holds the connection to the server, and stops cleanly on SIGINT: `was_interrupted` tells."""

    def __init__(self, target: Target, workload: Workload) -> None:
        self.target, self.workload = target, workload
        self.served = ServedModel("", None, "")
        self.was_interrupted = False
        self._driver: LoadDriver | None = None

    async def open(self) -> None:
        """Look at the server, and warm it up. Raises as `connected`, and where warming up fails."""
        client = self._client()
        try:
            self.served = await connected(
                client, self.target.url, self.target.model, vocabulary=self.workload.vocabulary
            )
            self._check_lengths()
        finally:
            client.close()
        await self._warm_up()

    async def measure(self, shape: Shape, *, number: int = 0, watch: Watcher = lambda _: True) -> Load:
        """One run. Each `number` has prompts of its own, and the same lengths and pattern of arrivals.

        The run ends early, and is then partial, when `watch` returns `False` or on SIGINT.
        """
        workload = self.workload
        seed = f"{workload.seed}:{number}"
        jobs = make_jobs(workload.entries, vocabulary=workload.vocabulary, seed=seed)
        if shape.concurrency is not None:
            return await self._drive(jobs, watch, lambda driver: driver.closed_loop(shape.concurrency or 1))
        if shape.rate is not None:
            arrivals_s = poisson_arrivals(len(jobs), shape.rate, str(workload.seed))
        elif any(job.arrival_s is None for job in jobs):
            raise ConfigError("this load has no arrival times: give --rate or --concurrency", key="--rate")
        else:
            arrivals_s = [job.arrival_s or 0.0 for job in jobs]
        return await self._drive(jobs, watch, lambda driver: driver.open_loop(arrivals_s))

    async def _warm_up(self) -> None:
        workload = self.workload
        first = make_jobs(workload.entries[:1], vocabulary=workload.vocabulary, seed=str(workload.seed))[0]
        jobs = list(
            warm_up_jobs(workload.num_warm_up, first, vocabulary=workload.vocabulary, seed=str(workload.seed))
        )
        if not jobs:
            return
        load = await self._drive(jobs, lambda _: True, lambda driver: driver.closed_loop(_WARM_UP_CONCURRENCY))
        failed = [record for record in load.records if not record.is_good]
        if failed and not self.was_interrupted:
            raise TandemError(f"a warm-up request failed ({failed[0].failure}): {failed[0].message}")

    async def _drive(
        self, jobs: Sequence[Job], watch: Watcher, shape: Callable[[LoadDriver], "asyncio.Future[Load]"]
    ) -> Load:
        ...


