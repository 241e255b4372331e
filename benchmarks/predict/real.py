"""A real cluster on this host, the loads that it is measured under, and what its workers wrote of their steps."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.parts.processes import Processes, start_cluster
from benchmarks.predict.loads import Load
from benchmarks.predict.simulated import Figures, measured
from tandem.bench.load.records import RequestRecord
from tandem.bench.load.workload import plain_vocabulary
from tandem.bench.report.summary import summarise
from tandem.bench.session import Session, Target, Workload
from tandem.core.tokenizer import Tokenizer
from tandem.sim.calibrate import Step, read_steps

_NUM_WARM_UP = 16
_STEPS = "steps"


@dataclass(frozen=True)
class ClusterSpec:
    """What is started.

    Attributes:
        num_of_each: prefill workers, and decode workers.
        kv_bytes: of each worker; 0: as the configuration says.
        config: of a `tandem.yaml`, for router and workers.
    """

    model_dir: Path
    num_of_each: int = 2
    kv_bytes: int = 0
    config: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Run:
    """One load under which a cluster was measured; `began_s` and `ended_s` by the clock of its steps."""

    load: Load
    records: list[RequestRecord]
    figures: Figures
    began_s: float
    ended_s: float

    def steps(self, steps: Sequence[Step]) -> list[Step]:
        """Those that were taken in it."""
        return [step for step in steps if self.began_s <= step.began_s < self.ended_s]


@dataclass
class Cluster:
    """One that runs."""

    url: str
    spec: ClusterSpec
    longest: int  # tokens of a prompt or an output that are asked for

    async def run(self, load: Load, seed: int, number: int = 0) -> Run:
        """`seed`: no other load may have it, since prompts would begin alike and be found in caches. Each `number` has
        prompts of its own, and the same lengths and arrivals.

        Raises `TandemError` where a request failed, `KeyboardInterrupt` on SIGINT."""
        vocabulary = plain_vocabulary(Tokenizer.from_dir(self.spec.model_dir))
        workload = Workload(load.entries(seed, self.longest), vocabulary, seed, num_warm_up=_NUM_WARM_UP)
        session = Session(Target(self.url), workload)
        await session.open()
        began_s = time.monotonic()
        found = await session.measure(load.shape, number=number)
        if session.was_interrupted:
            raise KeyboardInterrupt
        figures = measured(summarise(found.records, found.duration_s))
        return Run(load, found.records, figures, began_s, time.monotonic())


@contextlib.asynccontextmanager
async def running(directory: Path, spec: ClusterSpec, longest: int) -> AsyncIterator[Cluster]:
    """Once all workers can be used. Raises `TandemError` where a process ended, or was not ready in time."""
    config = directory / "tandem.yaml"
    metrics = {"step_log": str(directory / _STEPS)}
    config.write_text(json.dumps({**spec.config, "metrics": metrics}))  # JSON is YAML
    line = ("--config", str(config))
    kv = ("--kv-bytes", str(spec.kv_bytes)) if spec.kv_bytes else ()
    async with Processes(directory) as processes:
        router, _ = await start_cluster(processes, spec.model_dir, spec.num_of_each, *line, *kv, of_router=line)
        yield Cluster(router.facts["http"], spec, longest)


async def steps_of(directory: Path) -> list[Step]:
    """All that the workers of a cluster took, which has ended. Raises `ConfigError` where there are none."""
    return await asyncio.to_thread(read_steps, [directory / _STEPS])
