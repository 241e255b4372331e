"""A cluster whose pools follow a load on nodes that Ray's autoscaler brings and takes, beside its simulation.

Routers, workers, supervisor, law and Ray are real; only the engine's steps take the time that a model of them says, and
compute nothing, so that a small host holds them all.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import grpc
from rich.console import Console

from benchmarks.autoscale.live_section import FORMAT, section
from benchmarks.autoscale.ray_hosts import RayHosts
from benchmarks.code import Code
from benchmarks.in_loop import beside, in_loop
from benchmarks.law.loads import Kind, by_chance
from tandem.bench.load.records import RequestRecord, Slo
from tandem.bench.load.trace_entry import TraceEntry
from tandem.bench.load.workload import plain_vocabulary
from tandem.bench.machine import now
from tandem.bench.report import json_file
from tandem.bench.server_process import Command, running
from tandem.bench.session import Session, Shape, Target, Workload
from tandem.cluster.client import Where, find_cluster, supervisor
from tandem.cluster.following import node_advice
from tandem.cluster.plain import plain
from tandem.core.config import EMBEDDED_MODEL
from tandem.core.config_tree import build
from tandem.core.errors import TandemError
from tandem.core.identity import WORKER_ROLES
from tandem.core.model_path import resolve_model
from tandem.core.ports import free_port
from tandem.core.tokenizer import Tokenizer
from tandem.rpc.v1 import supervisor_pb2
from tandem.sim.load import Arrival
from tandem.sim.report import sizes_over_time
from tandem.sim.scenario import Scenario
from tandem.sim.world import World

_KIND = Kind(400, 48)
_LOOK_S = 2.0
_BACK_S = 240.0  # in which pools and nodes are to be as few as at first, once the load has ended


@dataclass(frozen=True)
class Plan:
    """Attributes:
    phases: requests a second, and for how long.
    most: workers of each pool; the fewest is one.
    nodes: of each type at most; empty: as many as `most`.
    max_queued_requests: by default more than come, as a slow host may take as long as the load lasts to start a worker.
    """

    phases: Sequence[tuple[float, float]] = ((0.7, 30.0), (4.0, 75.0), (0.7, 75.0))
    most: dict[str, int] = field(default_factory=lambda: {"prefill": 4, "decode": 3})
    nodes: dict[str, int] = field(default_factory=dict)
    shrink_delay_s: float = 20.0
    max_queued_requests: int = 10_000
    seed: int = 1

    def arrivals(self) -> list[Arrival]:
        return by_chance([(_KIND, rate, seconds) for rate, seconds in self.phases], self.seed)

    def scenario(self, start_s: float) -> dict[str, Any]:
        """Keys of a scenario: of its time model the live workers have their times and their room, too."""
        return {
            "times": "fitted",
            "fitted": {"base_ms": 40, "token_us": 1000},
            "refuses": True,
            "prefill": {"workers": 1, "tokens": 20_000},
            "decode": {"workers": 1, "tokens": 4_000},
            "pools": {**{role: {"min": 1, "max": num} for role, num in self.most.items()}, "start_s": start_s},
            "tandem": self.config,
        }

    @property
    def config(self) -> dict[str, Any]:
        """Keys of a `tandem.yaml` that hold for both."""
        return {
            "pools": {"shrink_delay_s": self.shrink_delay_s},
            "slo": {"ttft_ms": 5000, "tpot_ms": 150},
            "scheduling": {"mixed_pool": False, "max_queued_requests": self.max_queued_requests},
            "cache": {"prefix_cache": False},
            "transport": {"lease_s": 25.0},  # nobody is lost where all processes of a cluster share few cores
        }


@dataclass
class Watched:
    """What was seen of a cluster; seconds from the beginning of its load.

    Attributes:
        sizes: of each pool, after each change: when, workers that are wanted, and that are ready.
        nodes: of Ray, beside its head, after each change.
        num_steps: of each worker that has served.
        decisions: of the law that changed a pool's size, or were to.
        unplaced: workers for which Ray had no node, by the words of the law.
    """

    sizes: dict[str, list[tuple[float, int, int]]] = field(
        default_factory=lambda: {role.value: [] for role in WORKER_ROLES}
    )
    nodes: list[tuple[float, int]] = field(default_factory=list)
    num_steps: dict[str, int] = field(default_factory=dict)
    decisions: list[dict[str, Any]] = field(default_factory=list)
    unplaced: list[str] = field(default_factory=list)

    def hear(self, told: supervisor_pb2.Cluster, at_s: float) -> None:
        self.unplaced += [line for line in node_advice(told, "")[:1] if line not in self.unplaced]
        cluster = plain(told)
        for pool in cluster["pools"]:
            sizes = self.sizes.get(pool["role"])
            if sizes is not None and (not sizes or sizes[-1][1:] != (pool["wanted"], pool["ready"])):
                sizes.append((round(at_s, 2), pool["wanted"], pool["ready"]))
            for change in pool["changes"]:
                decision = {"role": pool["role"], **{name: change[name] for name in ("before", "wanted", "why")}}
                if decision not in self.decisions:
                    self.decisions.append(decision)
        for worker in cluster["workers"]:
            name, load = worker["member"]["worker_id"], worker["load"]
            if load is not None and load["steps"]:
                self.num_steps[name] = load["steps"]

    def is_back(self) -> bool:
        """Pools and nodes are as few as at first."""
        sizes = all(each and each[-1][1:] == (1, 1) for each in self.sizes.values())
        return sizes and self.nodes[-1][1] == len(self.sizes)

    def starts_s(self) -> list[float]:
        """From when each worker was asked for until it served."""
        return [seconds for sizes in self.sizes.values() for seconds in _starts_s(sizes)]


def _starts_s(sizes: Sequence[tuple[float, int, int]]) -> Iterator[float]:
    """Who was asked for first is ready first."""
    asked_s: list[float] = []
    for (_, before, ready_before), (at_s, wanted, ready) in pairwise(sizes):
        asked_s += [at_s] * (wanted - before)
        for _ in range(ready - ready_before):
            if asked_s:
                yield at_s - asked_s.pop(0)
        if wanted < before:
            del asked_s[max(0, len(asked_s) + wanted - before) :]


def run(json_path: Path | None, plan: Plan | None = None) -> None:
    """Print what was found, and write it to `json_path`. Raises `TandemError`, `ConfigError`."""
    json_file.check_before(json_path)
    tell = Console(stderr=True, soft_wrap=True)
    found = in_loop(lambda: measure(plan or Plan(), lambda text: tell.print(text, highlight=False)))
    content = {"format": FORMAT, "date": now(), "code": Code.of().as_json(), **found}
    Console(soft_wrap=True).print("\n".join(section(content)).strip(), highlight=False, markup=False)
    if json_path is not None:
        json_file.write(json_path, content)


async def measure(plan: Plan, tell: Callable[[str], None]) -> dict[str, Any]:
    """Plain data: the live run, and its simulation with the time that starts took. Raises `TandemError`."""
    # Whoever is being killed may still write there.
    with tempfile.TemporaryDirectory(prefix="tandem-autoscale-", ignore_cleanup_errors=True) as name:
        directory = Path(name)
        with RayHosts(directory, plan.nodes or plan.most) as hosts:
            tell(f"Ray runs at {hosts.address}")
            watched, records = await _live(plan, directory, hosts, tell)
    starts_s = watched.starts_s()
    if not starts_s:
        raise TandemError("no pool has grown: the load was too small")
    tell(f"{len(starts_s)} workers came, in {', '.join(f'{seconds:.0f}' for seconds in starts_s)} s; simulating")
    return {
        "plan": {**asdict(plan), "num_input": _KIND.num_input, "num_output": _KIND.num_output},
        "num_requests": len(records),
        "start_s": round(median(starts_s), 1),
        "starts_s": [round(seconds, 1) for seconds in starts_s],
        "live": {
            **asdict(watched),
            "kept_share": _kept_share(plan, records),
            "failures": Counter(f"{one.failure}: {one.message}" for one in records if not one.is_good),
        },
        "simulated": simulated(plan, median(starts_s)),
    }


def _kept_share(plan: Plan, records: Sequence[RequestRecord]) -> float:
    slo = Slo(plan.config["slo"]["ttft_ms"] / 1e3, plan.config["slo"]["tpot_ms"] / 1e3)
    return round(sum(map(slo.is_met_by, records)) / len(records), 4)


def simulated(plan: Plan, start_s: float) -> dict[str, Any]:
    """The same requests at the same times, on the same pools with the same settings."""
    world = World(build(Scenario, plan.scenario(round(start_s, 1))).shape())
    outcomes = world.run(plan.arrivals())
    sizes = {role.value: sizes_over_time(world, role) for role in WORKER_ROLES}
    decisions = [
        {"role": one.role.value, "before": one.before, "wanted": one.wanted, "why": one.why} for one in world.decisions
    ]
    return {
        "sizes": sizes,
        "decisions": decisions,
        "kept_share": round(world.figures.num_kept / len(outcomes), 4),
        "failures": Counter(one.error for one in outcomes if one.error),
    }


async def _live(
    plan: Plan, directory: Path, hosts: RayHosts, tell: Callable[[str], None]
) -> tuple[Watched, list[RequestRecord]]:
    port = free_port()
    async with running([_serve(plan, directory, hosts, port)], directory):
        began_s, watched = time.monotonic(), Watched()
        tell("the cluster serves; its load begins")
        async with _watching(port, hosts, watched, began_s) as looked:
            records = await _load(plan, port)
            tell("the load has ended")
            try:
                async with asyncio.timeout(_BACK_S):
                    while not watched.is_back():
                        looked.clear()
                        await looked.wait()
            except TimeoutError:
                sizes = {role: each[-1] for role, each in watched.sizes.items()}
                raise TandemError(f"{_BACK_S:g} s after the load {watched.nodes[-1][1]} nodes run: {sizes}") from None
    return watched, records


def _serve(plan: Plan, directory: Path, hosts: RayHosts, port: int) -> Command:
    times, config = directory / "scenario.yaml", directory / "tandem.yaml"
    times.write_text(json.dumps(plan.scenario(60.0)))  # JSON is YAML
    tree = {**plan.config, "security": {"tls": "off"}}
    tree["pools"] = {**tree["pools"], **{role: {"threads": 1} for role in plan.most}}
    config.write_text(json.dumps(tree))
    sizes = [option for role, num in plan.most.items() for option in (f"--{role}", f"1:{num}")]
    line = [sys.executable, "-m", "tandem.cli", "serve", "--config", str(config), "--port", str(port)]
    line += ["--engine", "simulated", "--time-model", str(times), "--address", hosts.address, *sizes]
    return Command("serve", tuple(line), port, hosts.env)


async def _load(plan: Plan, port: int) -> list[RequestRecord]:
    entries = [TraceEntry(one.num_input, one.num_output, one.arrived_s) for one in plan.arrivals()]
    vocabulary = plain_vocabulary(Tokenizer.from_dir(resolve_model(EMBEDDED_MODEL)))
    session = Session(Target(f"http://127.0.0.1:{port}"), Workload(entries, vocabulary, plan.seed, num_warm_up=0))
    await session.open()
    found = await session.measure(Shape())
    if session.was_interrupted:
        raise KeyboardInterrupt
    return found.records


@contextlib.asynccontextmanager
async def _watching(port: int, hosts: RayHosts, watched: Watched, began_s: float) -> AsyncIterator[asyncio.Event]:
    """Sizes are told by the supervisor at each change, nodes are looked at, which the event tells each time."""
    looked = asyncio.Event()
    with supervisor(find_cluster(Where(port=port))) as stub:
        call: Any = stub.WatchCluster(supervisor_pb2.WatchClusterRequest())  # gRPC's types know no `cancel` of it

        def hear() -> None:
            why = "it has ended"
            try:
                for message in call:
                    watched.hear(message, time.monotonic() - began_s)
            except grpc.RpcError as error:
                if error.code() is grpc.StatusCode.CANCELLED:
                    return
                why = f"{error.code()}: {error.details()}"
            raise TandemError(f"the supervisor tells no sizes any more: {why}")

        async def look() -> None:
            while True:
                num = await asyncio.to_thread(hosts.num_nodes)
                if not watched.nodes or watched.nodes[-1][1] != num:
                    watched.nodes.append((round(time.monotonic() - began_s, 1), num))
                looked.set()
                await asyncio.sleep(_LOOK_S)  # what Ray does can only be looked at

        async with beside(asyncio.to_thread(hear), look()):
            try:
                yield looked
            finally:
                call.cancel()
