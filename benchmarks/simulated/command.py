"""`python -m benchmarks simulated`: clusters whose steps take 20 ms and compute nothing, of more and more workers.

What a step takes beyond its 20 ms is what host, router and network cost; with it come the CPU time of a token in the
router and of a step in a decode worker. All of it shares this machine's cores, and so the largest cluster that holds
its steps is found.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json as json_format
import resource
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import uvloop
from rich.console import Console

from benchmarks.origin import origin
from benchmarks.parts.processes import Child, Processes, start_cluster
from benchmarks.simulated.section import FORMAT, section
from benchmarks.simulated.waterfalls import waterfalls
from tandem.bench.load.trace_entry import TraceEntry
from tandem.bench.load.workload import plain_vocabulary
from tandem.bench.machine import now
from tandem.bench.other_load import OtherLoad
from tandem.bench.report import json_file
from tandem.bench.report.summary import summarise
from tandem.bench.session import Session, Shape, Target, Workload
from tandem.core.config import EMBEDDED_MODEL
from tandem.core.errors import TandemError
from tandem.core.identity import WORKER_ROLES, Role
from tandem.core.model_path import resolve_model
from tandem.core.tokenizer import Tokenizer

_QUIET_S = 2.0


@dataclass(frozen=True)
class SimulatedSizes:
    """How much is measured.

    Attributes:
        clusters: workers of each role, one cluster after the other.
        num_seqs: that each decode worker generates for at once.
        step_ms: of every step, whatever is in it.
        num_rounds: requests of each of these sequences' clients.
    """

    clusters: tuple[int, ...] = (1, 2, 4, 8)
    num_seqs: int = 64
    step_ms: float = 20.0
    num_input: int = 128
    num_output: int = 400
    num_rounds: int = 2
    quiet_s: float = _QUIET_S


def run(json: Path | None, sizes: SimulatedSizes) -> None:
    """Print the section, and write everything to `json`.

    Raises:
        ConfigError: it cannot be written.
        TandemError: a process ended, was not ready in time, or a request failed.
    """
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        content = runner.run(measure(sizes, lambda text: Console(stderr=True).print(text, highlight=False)))
    Console(soft_wrap=True).print("\n".join(section(content)).strip(), highlight=False, markup=False)
    if json is not None:
        json_file.write(json, content)


async def measure(sizes: SimulatedSizes, tell: Callable[[str], None]) -> dict[str, Any]:
    """Plain data, a run for each cluster."""
    runs = []
    for num_of_each in sizes.clusters:
        tell(f"{num_of_each} prefill and {num_of_each} decode workers, {sizes.num_seqs * num_of_each} requests at once")
        load = OtherLoad()
        await asyncio.sleep(sizes.quiet_s)
        other_cores = load.cores()
        with tempfile.TemporaryDirectory(prefix="tandem-simulated-") as directory:
            figures = await _measure_one(Path(directory), sizes, num_of_each)
        runs.append({"num_of_each": num_of_each, "date": now(), "other_cores": other_cores, "figures": figures})
    return {"format": FORMAT, **origin(), "settings": dataclasses.asdict(sizes), "runs": runs}


async def _measure_one(directory: Path, sizes: SimulatedSizes, num_of_each: int) -> dict[str, Any]:
    model_dir = resolve_model(EMBEDDED_MODEL)
    config = _write_config(directory, sizes)
    async with Processes(directory) as processes:
        options = ("--config", str(config))
        router, workers = await start_cluster(processes, model_dir, num_of_each, *options, of_router=options)
        concurrency = sizes.num_seqs * num_of_each
        entries = [TraceEntry(sizes.num_input, sizes.num_output)] * (concurrency * sizes.num_rounds)
        vocabulary = plain_vocabulary(Tokenizer.from_dir(model_dir))
        session = Session(Target(router.facts["http"]), Workload(entries, vocabulary, num_warm_up=4 * num_of_each))
        await session.open()
        cpu = _Cpu(router, workers)
        load = await session.measure(Shape(concurrency=concurrency))
        used = cpu.used()
        good = [record for record in load.records if record.is_good]
        fall = await waterfalls(router.facts["http"], good) if good else None
    if session.was_interrupted:
        raise KeyboardInterrupt
    summary = summarise(load.records, load.duration_s)
    if summary.num_failed:
        raise TandemError(f"requests failed: {summary.num_failed}, such as: {summary.failure_examples}")
    assert summary.tpot_s is not None
    assert summary.itl_s is not None
    assert summary.ttft_s is not None
    num_tokens = summary.num_output_tokens
    return {
        "duration_s": summary.duration_s,
        "output_tokens_per_s": summary.output_tokens_per_s,
        "tpot_s": summary.tpot_s.mean,
        "itl_p99_s": summary.itl_s.p99,
        "ttft_s": summary.ttft_s.mean,
        "router_s_a_token": used["router"] / num_tokens,
        "decode_s_a_token": used["decode"] / num_tokens,
        "waterfalls": dataclasses.asdict(fall) if fall is not None else None,
        "cores": {name: seconds / summary.duration_s for name, seconds in used.items()},
    }


def _write_config(directory: Path, sizes: SimulatedSizes) -> Path:
    times = directory / "times.yaml"
    spec = {"times": "fitted", "fitted": {"base_ms": sizes.step_ms}}
    times.write_text(json_format.dumps(spec))  # JSON is YAML
    config = directory / "tandem.yaml"
    # All requests come at once: none is to be refused.
    scheduling = {"max_queued_requests": 10_000}
    model = {"engine": "simulated", "time_model": str(times)}
    config.write_text(json_format.dumps({"model": model, "scheduling": scheduling}))
    return config


class _Cpu:
    """CPU time of a cluster's processes, and of the load generator, which is this one, since it was made."""

    def __init__(self, router: Child, workers: Sequence[tuple[Role, Child]]) -> None:
        of_role = {str(role): [child for own, child in workers if own is role] for role in WORKER_ROLES}
        self._parts = {"router": [router], **of_role}
        self._before = self._now()
        self._began_s = time.monotonic()

    def _now(self) -> dict[str, float]:
        found = {
            name: sum(sum(psutil.Process(child.pid).cpu_times()[:2]) for child in children)
            for name, children in self._parts.items()
        }
        own = resource.getrusage(resource.RUSAGE_SELF)
        return {**found, "load generator": own.ru_utime + own.ru_stime}

    def used(self) -> dict[str, float]:
        """Seconds, by part."""
        return {name: value - self._before[name] for name, value in self._now().items()}
