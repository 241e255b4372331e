"""A cluster of plain processes, without Ray: the real router and workers, the real transport, HTTP on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tandem.core.fault_points import VARIABLE
from tandem.core.model_path import resolve_model
from tandem.core.ports import free_port
from tandem.rpc.channel import make_channel
from tandem.rpc.v1 import common_pb2 as pb
from tandem.rpc.v1 import control_pb2, control_pb2_grpc
from tests.support import fork_server
from tests.support.waiting import nothing, wait_until

START_TIMEOUT_S = 120.0
PAGE_STATES = ("free", "used", "reserved", "cached", "quarantined")
ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Process:
    """One process of the cluster and the facts of its ready file."""

    name: str
    popen: fork_server.Started
    ready_file: Path
    log: Path
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def pid(self) -> int:
        return self.popen.pid

    @property
    def lives(self) -> bool:
        return self.popen.poll() is None

    @property
    def incarnation(self) -> str:
        """Of a worker that is ready; else empty."""
        return str(self.facts.get("incarnation", ""))

    def kill(self, number: int = signal.SIGKILL) -> None:
        self.popen.send_signal(number)

    def end(self) -> None:
        """SIGKILL, and wait until it has ended."""
        self.kill()
        self.popen.wait()

    def is_ready(self) -> bool:
        """Whether it has told where it listens; fails with the log when it has ended instead."""
        if not self.facts:
            if self.ready_file.exists():
                self.facts = json.loads(self.ready_file.read_text())
            elif not self.lives:
                raise AssertionError(f"{self.name} did not start:\n{self.log.read_text()[-4000:]}")
        return bool(self.facts)

    def wait_ready(self) -> None:
        """Until the ready file is there."""
        what = f"the start of {self.name}"
        wait_until(self.is_ready, what, START_TIMEOUT_S, every_s=0.05, more=lambda: self.log.read_text()[-4000:])


class ProcessCluster:
    """Starts, kills and replaces the processes of one cluster, and tells the router who is there.

    Attributes:
        points: the directory whose files arm `tandem.core.fault_points` in every process; `None`: no points.
        decode_module: what a decode worker's process runs.
        anew: the first process of each kind is started by an interpreter of its own, as users start it.
        other_routers: beside `router`; all share its port.
        colocated: as the router is told; set by `launch`, and by who adds or takes away prefill workers.
    """

    def __init__(
        self,
        directory: Path,
        model: str = "embedded",
        config: dict[str, Any] | None = None,
        points: Path | None = None,
        *,
        num_routers: int = 1,
        decode_module: str = "decode_worker",
        anew: bool = False,
    ) -> None:
        self._num_routers = num_routers
        self._modules = {"prefill": "prefill_worker", "decode": decode_module}
        self.directory = directory
        self.points = points
        self._anew, self._started = anew, set[str]()
        self.colocated = False
        self.url = f"http://127.0.0.1:{free_port()}"  # stays when the router is started again
        self.model_dir = resolve_model(model)
        self.core_shares = directory / "core-shares"
        self.config_file = directory / "tandem.yaml"
        self.config_file.write_text(yaml.safe_dump(config or {}))
        self.workers: dict[str, Process] = {}
        self._all_workers: list[Process] = []
        self.router: Process
        self.other_routers: list[Process] = []
        self._membership_version = 0
        self._num_started = 0

    @property
    def processes(self) -> list[Process]:
        """The newest of each name."""
        return [*self.routers, *self.workers.values()]

    @property
    def routers(self) -> list[Process]:
        return [self.router, *self.other_routers]

    # -- processes

    def _start(self, name: str, module: str, *arguments: str) -> Process:
        self._num_started += 1
        ready, log = (self.directory / f"{name}.{self._num_started}.{kind}" for kind in ("json", "log"))
        line = (
            "--config", str(self.config_file), "--model-dir", str(self.model_dir), "--ready-file", str(ready),
            *arguments,
        )  # fmt: skip
        environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "PYTHONPATH": str(ROOT)}
        environment["PYTHONFAULTHANDLER"] = "1"  # one that must be killed by SIGABRT says where it hangs
        if self.points is not None:
            environment[VARIABLE] = str(self.points)
        anew = self._anew and module not in self._started
        self._started.add(module)
        popen = fork_server.start(module, line, log, self.directory, environment, anew=anew)
        return Process(name, popen, ready, log)

    def start_worker(self, role: str, number: int = 0, *arguments: str) -> Process:
        """Start a worker without waiting for it; a dead one of the same name is replaced."""
        name = f"{role}-{number}"
        shared = ("--kv-bytes", str(48 << 20), "--core-shares", str(self.core_shares))
        process = self._start(name, self._modules[role], "--worker-id", name, *shared, *arguments)
        self.workers[name] = process
        self._all_workers.append(process)
        return process

    def start_router(self) -> Process:
        self.router = self._start_router("router")
        return self.router

    def _start_router(self, name: str) -> Process:
        meeting = ("--name", name, "--siblings", str(self.directory / "siblings")) if self._num_routers > 1 else ()
        return self._start(name, "router", "--http-port", self.url.rpartition(":")[2], *meeting)

    def launch(self, num_prefill: int = 1, num_decode: int = 1) -> None:
        """Start everything, and wait for nothing."""
        self.colocated = not num_prefill
        self.start_router()
        self.other_routers = [self._start_router(f"router-{n}") for n in range(1, self._num_routers)]
        for n in range(num_prefill):
            self.start_worker("prefill", n)
        for n in range(num_decode):
            self.start_worker("decode", n)

    def wait_started(self) -> None:
        """Until all that was launched is ready and, when no pool lacks workers, `/health` says 200."""
        for process in self.processes:
            process.wait_ready()
        self.publish()
        if {name.partition("-")[0] for name in self.workers} >= (
            {"decode"} if self.colocated else {"prefill", "decode"}
        ):
            self.wait_healthy()

    def publish(self) -> None:
        """Tell the routers about all workers that live."""
        asyncio.run(self.push_membership())

    async def push_membership(self) -> None:
        """As `publish`. Raises gRPC's error where a router does not take it."""
        self._membership_version += 1
        members = [
            control_pb2.Member(
                worker_id=name,
                incarnation=process.facts["incarnation"],
                role=pb.ROLE_PREFILL if name.startswith("prefill") else pb.ROLE_DECODE,
                address=process.facts["address"],
                state="ready",
                node="localhost",
                pid=process.pid,
            )
            for name, process in self.workers.items()
            if process.lives and process.facts
        ]
        ended = [process.incarnation for process in self._all_workers if process.facts and not process.lives]
        membership = control_pb2.Membership(
            version=self._membership_version,
            members=members,
            ended=ended,
            colocated=self.colocated,
            num_routers=len(self.routers),
        )
        everyone = [
            control_pb2.OtherRouter(name=router.name, control_address=router.facts["control"], shares_port=True)
            for router in self.routers
        ]
        for number, router in enumerate(self.routers):
            membership.router_number = number
            del membership.other_routers[:]
            membership.other_routers.extend(other for other in everyone if other.name != router.name)
            async with make_channel(router.facts["control"]) as channel:
                await control_pb2_grpc.RouterControlStub(channel).SetMembership(membership, timeout=10)

    def wait_healthy(self, timeout_s: float = 30.0) -> None:
        self.wait_for(lambda: httpx.get(f"{self.url}/health").status_code == 200, "health", timeout_s)

    def stop(self) -> None:
        """End all processes; those that must be killed make the test fail, and say where they hang."""
        processes = self.processes
        for process in processes:
            if process.lives:
                process.kill(signal.SIGCONT)
                process.kill(signal.SIGTERM)
        stuck = []
        for process in processes:
            try:
                process.popen.wait(20)
            except subprocess.TimeoutExpired:
                process.kill(signal.SIGABRT)
                process.popen.wait()
                stuck.append(f"{process.name}:\n{process.log.read_text()[-6000:]}")
        assert not stuck, "had to be killed: " + "\n".join(stuck)

    # -- looking

    def status(self) -> dict[str, Any]:
        answer: dict[str, Any] = httpx.get(f"{self.url}/v1/cluster").json()
        return answer

    def statuses(self) -> dict[str, pb.WorkerStatus]:
        """Every living worker's own word on its load and pages."""
        return statuses_at({name: p.facts["address"] for name, p in self.workers.items() if p.lives and p.facts})

    def router_status(self) -> control_pb2.RouterStatusReply:
        """How many exchanges and requests the router has."""

        async def ask() -> control_pb2.RouterStatusReply:
            async with make_channel(self.router.facts["control"]) as channel:
                stub = control_pb2_grpc.RouterControlStub(channel)
                return await stub.RouterStatus(control_pb2.RouterStatusRequest(), timeout=10)

        return asyncio.run(ask())

    def pages(self) -> dict[str, dict[str, int]]:
        """Counts of pages by state, of every living worker."""
        return {
            name: {state: getattr(status.pages, state) for state in PAGE_STATES}
            for name, status in self.statuses().items()
        }

    def metric(self, name: str, **labels: str) -> float:
        """Sum of a metric over its labels; with `labels`, of the series that have them."""
        families = text_string_to_metric_families(httpx.get(f"{self.url}/metrics").text)
        return sum(
            sample.value
            for family in families
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    def wait_for(
        self,
        look: Callable[[], Any],
        what: str,
        timeout_s: float = 10.0,
        wanted: Callable[[Any], object] = bool,
    ) -> None:
        """As `wait_until`; a failure shows what the processes have logged."""

        def look_again() -> Any:
            try:
                return look()
            except httpx.TransportError as error:
                return error

        def is_wanted(seen: Any) -> object:
            return not isinstance(seen, httpx.TransportError) and wanted(seen)

        wait_until(look_again, what, timeout_s, wanted=is_wanted, every_s=0.02, more=self.logs)

    def wait_idle(self, timeout_s: float = 5.0) -> None:
        """Until no worker holds a request, or a page for one."""

        def held() -> dict[str, str]:
            return {name: str(status) for name, status in self.statuses().items() if holds_anything(status)}

        self.wait_for(held, "idle workers", timeout_s, wanted=nothing)

    def logs(self) -> str:
        return "\n".join(f"== {p.name}\n{p.log.read_text()[-1500:]}" for p in self.processes)


def statuses_at(addresses: dict[str, str]) -> dict[str, pb.WorkerStatus]:
    """What the workers at these addresses say of themselves, by the same names."""

    async def ask(address: str) -> pb.WorkerStatus:
        async with make_channel(address) as channel:
            stub = control_pb2_grpc.WorkerControlStub(channel)
            return await stub.Status(control_pb2.StatusRequest(), timeout=10)

    async def ask_all() -> dict[str, pb.WorkerStatus]:
        return dict(zip(addresses, await asyncio.gather(*map(ask, addresses.values())), strict=True))

    return asyncio.run(ask_all())


def holds_anything(status: pb.WorkerStatus) -> bool:
    """Whether a worker has a request, or a page for one."""
    pages = status.pages
    return any((status.num_running, status.num_queued, pages.used, pages.reserved, pages.quarantined))


def shows_idle(url: str) -> bool:
    """Whether the router has heard that every worker is idle: it places by what it has heard."""
    shown = httpx.get(f"{url}/v1/cluster").json()
    workers = [*shown["prefill"], *shown["decode"]]
    held = [
        (w["num_running"], w["num_queued"], *(w["pages"][s] for s in ("used", "reserved", "quarantined")))
        for w in workers
    ]
    return not any(map(any, held))


@contextlib.contextmanager
def running(directory: Path, num_prefill: int = 1, num_decode: int = 1, **options: Any) -> Iterator[ProcessCluster]:
    """A cluster for the length of a `with` block; nothing of it is left afterwards."""
    cluster = ProcessCluster(directory, **options)
    try:
        cluster.launch(num_prefill, num_decode)
        cluster.wait_started()
        yield cluster
    finally:
        cluster.stop()
