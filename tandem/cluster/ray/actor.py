"""The Ray actors: thin shells around processes that also run without Ray.

None holds any logic. Ray sets `OMP_NUM_THREADS` and takes the signals, so threads come with the actor's environment
and stopping is a call.

While an actor's main thread runs no call, Ray looks for signals there 100 times a second, which takes more than all
else that an idle process does. So workers, router and supervisor take one call at a time, which runs in the main
thread, and are always in one of some seconds: workers and router are asked to wait for their end, and the supervisor
asks itself to rest. What must not wait for that comes by gRPC, or from Ray's control store.
"""

from __future__ import annotations

import ctypes
import dataclasses
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from tandem.cluster.ray.home import session_directory, unreachable
from tandem.cluster.spec import NAMESPACE, ClusterSpec
from tandem.core import fault_points
from tandem.core.addresses import split_address
from tandem.core.errors import InternalError, TandemError
from tandem.core.logging import setup_logging
from tandem.core.machine import HostBoot, this_boot
from tandem.core.model_path import resolve_model
from tandem.core.pidfd import started_at
from tandem.rpc.permissions import PeerRole
from tandem.rpc.security import configure, is_loopback

WAIT_SLICE_S = 4.0
"""Seconds that one call waits at most: all calls of an actor share one thread. The call of a supervisor that died goes
on so long, and those of its successor wait behind it."""


@dataclass(frozen=True)
class ActorState:
    """What a worker's or the router's actor says of itself."""

    node: str
    node_id: str  # Ray's
    pid: int
    started: int  # in clock ticks since boot
    boot: HostBoot  # under which it runs
    address: str = ""  # of its control service; empty until it listens
    url: str = ""  # where clients of a router go; empty until it listens
    draining: bool = False
    incarnation: str = ""  # of a worker: the life that it is in now, by its incarnation


def make_actor(cls: type, **options: Any) -> Any:
    """Detached: it ends by a call or with its Ray cluster, not with the process that asked for it."""
    common = {"namespace": NAMESPACE, "lifetime": "detached", "num_cpus": 0}
    return ray.remote(cls).options(**{**common, **options})


def pinned(node_id: str, address: str) -> dict[str, Any]:
    """Options of an actor that runs on this node and no other.

    A trifle of the resource that every node has by its address: an actor that needs no resource at all is first offered
    to any node, perhaps one that is dead, and waits until Ray knows that.
    """
    own = {f"node:{address}": 0.001} if address else {}
    return {"scheduling_strategy": NodeAffinitySchedulingStrategy(node_id, soft=False), "resources": own}


def translate(error: BaseException) -> TandemError:
    """What an awaited call raised, as one of ours: Ray's border. Anything unknown is `InternalError`."""
    if isinstance(error, TandemError):
        return error
    cause: BaseException = getattr(error, "cause", None) or error
    if isinstance(cause, TandemError):
        return cause
    return InternalError(f"{type(cause).__name__}: {str(cause).strip()}")


def model_dir_of(spec: ClusterSpec) -> Path:
    if spec.model_dir:
        return Path(spec.model_dir)
    model = spec.config.model
    return resolve_model(model.path, with_weights=model.engine == "torch")


def worker_host(spec: ClusterSpec) -> str:
    """The address of this node on which processes of the cluster listen for each other.

    Raises:
        ConfigError: Ray knows the node by one that leads nowhere from the head.
    """
    if spec.local:
        return "127.0.0.1"
    host = str(ray.util.get_node_ip_address())
    if is_loopback(host) and not is_loopback(split_address(spec.ray_address)[0]):
        raise unreachable(host)
    return host


def begin(spec: ClusterSpec, name: str, role: PeerRole | None) -> None:
    """What every actor does first: it ties its life to its raylet's, and sets up its name, its log and its gRPC."""
    _die_with_parent()
    fault_points.name_process(name)
    _set_up_log(spec, name)
    if role is not None:
        configure(spec.config.security, role, worker_host(spec))


def this_process() -> ActorState:
    pid = os.getpid()
    started = started_at(pid)
    assert started is not None
    address = ray.util.get_node_ip_address()
    return ActorState(address, ray.get_runtime_context().get_node_id(), pid, started, this_boot(address))


def _die_with_parent() -> None:
    """Let the kernel kill this process when its raylet dies.

    Else it would serve on for many seconds on a node that Ray has given up, beside its own replacement.
    """
    pr_set_pdeathsig = 1
    ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL)


def _set_up_log(spec: ClusterSpec, process: str) -> None:
    """Logs, and whatever else the process and its libraries print, go to one file for all lives of `process`."""
    directory = Path(spec.log_directory) if spec.log_directory else own_log_directory()
    directory.mkdir(parents=True, exist_ok=True)
    target = os.open(directory / f"{process}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(target, 1)
    os.dup2(target, 2)
    os.close(target)
    setup_logging(dataclasses.replace(spec.config.logging, directory=""), process)


def own_log_directory() -> Path:
    """Where processes of this node keep their logs, if the configuration names no directory."""
    return session_directory() / "logs"
