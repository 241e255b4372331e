"""A cluster of plain processes for the length of a measurement: router and workers, without Ray."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from tandem.bench.child_process import log_tail, start_child, stop_child
from tandem.core.errors import TandemError
from tandem.core.identity import WORKER_ROLES, Role
from tandem.rpc.channel import make_channel
from tandem.rpc.convert import ROLE_TO_PROTO
from tandem.rpc.v1 import control_pb2
from tandem.rpc.v1.control_pb2_grpc import RouterControlStub

_START_S = 120.0
_LOOK_S = 0.01  # between two looks for a ready file
_TELL_S = 10.0


@dataclass
class Child:
    """One process; `ready_file` appears when it can be used, and holds its facts as JSON."""

    name: str
    process: asyncio.subprocess.Process
    log: Path
    ready_file: Path
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def pid(self) -> int:
        return self.process.pid

    async def ready(self) -> Child:
        """Itself, once it can be used.

        Raises:
            TandemError: it ended, or was not ready in time.
        """
        deadline_s = time.monotonic() + _START_S
        while not self.ready_file.exists():
            if self.process.returncode is not None:
                raise TandemError(f"{self.name} ended with {self.process.returncode}; {log_tail(self.log)}")
            if time.monotonic() > deadline_s:
                raise TandemError(f"{self.name} was not ready after {_START_S:.0f} s; {log_tail(self.log)}")
            await asyncio.sleep(_LOOK_S)  # what other processes do can only be looked at
        self.facts = json.loads(self.ready_file.read_text())
        return self


class Processes:
    """Processes that end with the `async with` block, whatever ends it.

    Args:
        directory: for logs and ready files.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._children: list[Child] = []

    async def __aenter__(self) -> Processes:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.gather(*(stop_child(child.process) for child in self._children))

    async def start(self, name: str, module: str, *arguments: str, num_threads: int = 1) -> Child:
        """`python -m module arguments… --ready-file FILE`, as the cluster would start it."""
        log = self.directory / f"{name}.log"
        ready_file = self.directory / f"{name}.json"
        ready_file.unlink(missing_ok=True)
        line = [sys.executable, "-m", module, *arguments, "--ready-file", str(ready_file)]
        env = {"OMP_NUM_THREADS": str(num_threads), "OMP_WAIT_POLICY": "passive"}
        child = Child(name, await start_child(line, log, env, own_session=False), log, ready_file)
        self._children.append(child)
        return child


@dataclass(frozen=True)
class WorkerOptions:
    """How the workers of a cluster are started.

    Attributes:
        num_threads: of each engine.
        kv_bytes: of each arena.
        model: section `model` of the configuration.
    """

    model_dir: Path
    transport: str
    num_threads: int
    kv_bytes: int
    device: str = "cpu"
    model: dict[str, str] = field(default_factory=dict)


async def start_workers(processes: Processes, options: WorkerOptions) -> tuple[Child, Child]:
    """A prefill and a decode worker, both ready. Decode keeps no prefix cache: every handoff moves all pages."""
    started = []
    for role in ("prefill", "decode"):
        config = {
            "transport": {"name": options.transport},
            "cache": {"prefix_cache": role == "prefill"},
            "model": options.model,
        }
        file = processes.directory / f"{role}.yaml"
        file.write_text(json.dumps(config))  # JSON is YAML
        line = (
            "--config", str(file), "--model-dir", str(options.model_dir), "--threads", str(options.num_threads),
            "--kv-bytes", str(options.kv_bytes), "--device", options.device,
        )  # fmt: skip
        started.append(await processes.start(role, f"{role}_worker", *line, num_threads=options.num_threads))
    prefill, decode = [await child.ready() for child in started]
    return prefill, decode


async def start_cluster(
    processes: Processes,
    model_dir: Path,
    num_of_each: int,
    *of_workers: str,
    module: str = "router",
    of_router: tuple[str, ...] = (),
) -> tuple[Child, list[tuple[Role, Child]]]:
    """A router and so many workers of each role, all ready and told of each other; with the roles of the workers.

    Args:
        of_workers, of_router: their options.
        module: what is run as a router.
    """
    line = ("--model-dir", str(model_dir), *of_workers)
    started: list[tuple[Role, Child]] = []
    for role in WORKER_ROLES:
        for number in range(num_of_each):
            name = f"{role}-{number}"
            started.append((role, await processes.start(name, f"{role}_worker", *line, "--worker-id", name)))
    facts = [(str(role), (await child.ready()).facts) for role, child in started]
    router = await start_router(processes, model_dir, *of_router, module=module)
    await tell_router(router, facts)
    return router, started


async def start_router(
    processes: Processes, model_dir: Path, *options: str, name: str = "router", port: int = 0, module: str = "router"
) -> Child:
    """A router on `port`, by default a free one, which knows no worker yet; `module` is what is run as one."""
    line = ("--model-dir", str(model_dir), "--http-port", str(port), "--drain-s", "1", *options)
    return await (await processes.start(name, module, *line)).ready()


async def tell_router(
    router: Child, workers: Iterable[tuple[str, dict[str, Any]]], others: Mapping[str, Child] | None = None
) -> None:
    """Tell `router` of its workers, the role and the facts of each, and of the routers by name that share its port."""
    members = [
        control_pb2.Member(
            worker_id=facts["id"],
            incarnation=facts["incarnation"],
            role=ROLE_TO_PROTO[Role(role)],
            address=facts["address"],
            state="ready",
            node="localhost",
            pid=facts["pid"],
        )
        for role, facts in workers
    ]
    async with make_channel(router.facts["control"]) as channel:
        stub: Any = RouterControlStub(channel)
        membership = control_pb2.Membership(version=1, members=members)
        for name, other in (others or {}).items():
            membership.other_routers.add(name=name, control_address=other.facts["control"], shares_port=True)
        await stub.SetMembership(membership, timeout=_TELL_S)


def threads_of_each() -> int:
    """CPU threads of each of two workers that share this process's cores."""
    return max(1, len(os.sched_getaffinity(0)) // 2)
