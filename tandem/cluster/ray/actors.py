"""The Ray actors: thin shells around processes that also run without Ray.

None holds any logic. Ray sets `OMP_NUM_THREADS` and takes the signals, so threads come with the actor's environment
and stopping is a call.

While an actor's main thread runs no call, Ray looks for signals there 100 times a second, which takes more than all
else that an idle process does. So workers, router and supervisor take one call at a time, which runs in the main
thread, and are always in one of some seconds: workers and router are asked to wait for their end, and the supervisor
asks itself to rest. What must not wait for that comes by gRPC, or from Ray's control store.
"""

from __future__ import annotations

import asyncio
import ctypes
import dataclasses
import logging
import os
import signal
import sys
import threading
import time
from concurrent import futures
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from tandem.cluster.ray.home import session_directory
from tandem.cluster.ray.node_resources import kv_bytes_here
from tandem.cluster.ray.node_watcher import NodeWatcher, ProcessId, started_at
from tandem.cluster.spec import NAMESPACE, ClusterSpec, SupervisorFace
from tandem.core import points
from tandem.core.errors import InternalError, TandemError
from tandem.core.identity import Role
from tandem.core.logging import setup_logging
from tandem.core.model_path import resolve_model
from tandem.rpc.permissions import PeerRole
from tandem.rpc.security import configure
from tandem.worker.exits import host_id

if TYPE_CHECKING:
    from tandem.worker.process import WorkerProcess


WAIT_SLICE_S = 4.0
"""Seconds that one call waits in the one thread that an actor's calls have. What a supervisor that died has asked goes
on so long, and its successor waits for it before it is told the actor's state."""


@dataclass(frozen=True)
class ActorState:
    """What a worker's or the router's actor says of itself.

    Attributes:
        node_id: Ray's.
        started: of the process, in clock ticks since boot.
        info: a serialised `WorkerInfo`; empty while it loads.
    """

    node: str
    node_id: str
    pid: int
    started: int
    info: bytes = b""
    draining: bool = False


class WorkerActor:
    """One incarnation of a prefill or decode worker.

    Args:
        spec: of the whole cluster.
        role: "prefill" or "decode".
        num_threads: CPU threads, already in this process's `OMP_NUM_THREADS`.
    """

    def __init__(self, spec: ClusterSpec, role: str, worker_id: str, incarnation: str, num_threads: int) -> None:
        _begin(spec, worker_id, PeerRole(role))
        self._spec, self._role = spec, Role(role)
        self._worker_id, self._incarnation, self._num_threads = worker_id, incarnation, num_threads
        self._started: Future[WorkerProcess] | None = None  # set with the first `start`

    def state(self) -> ActorState:
        state = _this_process()
        if self._started is None or not self._started.done() or self._started.exception() is not None:
            return state
        worker = self._started.result()
        return dataclasses.replace(state, info=worker.info.SerializeToString(), draining=worker.draining)

    def start(self, timeout_s: float) -> bool:
        """Load the model and listen, from the first call on; whether it does, after at most `timeout_s`. Raises what
        prevented it."""
        if self._started is None:
            self._started = Future()
            threading.Thread(target=self._start, args=(self._started,), name="start", daemon=True).start()
        done, _ = futures.wait([self._started], timeout_s)
        for started in done:
            started.result()
        return bool(done)

    def wait_closed(self, timeout_s: float) -> bool:
        """Whether it has stopped, after at most `timeout_s`; stops it if that was asked for. Raises what made it fail.

        To be called when it has started.
        """
        if self._started is None or not self._started.done():
            raise InternalError(f"{self._worker_id} has not been started")
        worker = self._started.result()
        if not worker.wait_closed(timeout_s):
            return False
        worker.stop()
        return True

    def _start(self, started: Future[WorkerProcess]) -> None:
        try:
            worker = self._make()
            worker.start()
        except BaseException as error:  # noqa: BLE001 - handed to the caller of `start`
            started.set_exception(error)
        else:
            started.set_result(worker)

    def _make(self) -> WorkerProcess:
        spec = self._spec
        pool, model_dir = getattr(spec.config.pools, self._role), _model_dir(spec)
        return _worker_class(self._role)(
            spec.config,
            worker_id=self._worker_id,
            incarnation=self._incarnation,
            model_dir=model_dir,
            kv_bytes=spec.kv_bytes[self._role] or kv_bytes_here(spec.config, self._role, model_dir),
            num_threads=self._num_threads,
            host=worker_host(spec),
            device="cuda" if pool.gpus else "cpu",
            # A session's directory may be shared by hosts, on a network drive.
            core_shares=session_directory() / f"tandem-core-shares-{host_id().replace('/', '-')}",
        )


class RouterActor:
    """One incarnation of the router.

    Args:
        key_digests: of the API keys in the environment of `tandem serve`; what stands in Ray's own counts for nothing.
    """

    def __init__(self, spec: ClusterSpec, key_digests: frozenset[bytes]) -> None:
        from router.server import RouterServer

        _begin(spec, "router", PeerRole.ROUTER)
        self._http, self._key_digests = spec.config.http, key_digests
        self._server = RouterServer(
            spec.config,
            model_dir=_model_dir(spec),
            host=self._http.host,
            http_port=self._http.port,
            key_digests=key_digests,
        )
        self._addresses: tuple[str, str] | None = None

    def state(self) -> ActorState:
        return _this_process()

    def start(self) -> tuple[str, str]:
        """Listen; URL for clients and address of RouterControl. Idempotent."""
        from router.http.auth import check_not_lost

        if self._addresses is None:
            check_not_lost(self._http, self._key_digests, os.environ)
            info = self._server.start()
            self._addresses = info.http_url, info.control_address
        return self._addresses

    def wait_closed(self, timeout_s: float) -> bool:
        """Whether it has stopped, after at most `timeout_s`."""
        return self._server.wait_closed(timeout_s)


class WatcherActor:
    """The watcher of a node other than the supervisor's; its calls are coroutines, so that any number may wait."""

    def __init__(self, spec: ClusterSpec) -> None:
        _begin(spec, "watcher", None)
        self._watcher: NodeWatcher | None = None

    async def wait_ended(self, process: ProcessId, timeout_s: float) -> bool:
        """Whether it has provably ended, after at most `timeout_s`."""
        return await self._running().wait_ended(process, timeout_s)

    async def kill(self, process: ProcessId) -> None:
        self._running().kill(process)

    async def watched(self) -> dict[str, bool]:
        return self._running().watched()

    def _running(self) -> NodeWatcher:
        if self._watcher is None:  # the event loop is there from the first call on
            self._watcher = NodeWatcher()
        return self._watcher


class SupervisorActor:
    """Runs `tandem.cluster.supervisor.supervisor` in an event loop of its own; Ray starts it again whenever it dies.

    No method is a coroutine: Ray would run its calls elsewhere than in the main thread.
    """

    def __init__(self, spec: ClusterSpec, key_digests: frozenset[bytes]) -> None:
        _begin(spec, "supervisor", PeerRole.SUPERVISOR)
        address = f"{worker_host(spec)}:{spec.control_port}"
        self._face = SupervisorFace(address, spec.config.security, os.getpid(), _this_process().started)
        self._ready = threading.Event()
        threading.Thread(target=self._run, args=(spec, key_digests), name="supervisor", daemon=True).start()

    def wait_ready(self) -> SupervisorFace:
        """Until it serves."""
        self._ready.wait()
        return self._face

    def rest(self, seconds: float) -> None:
        """Nothing; the supervisor asks for it all the time, so that Ray leaves the main thread alone."""
        time.sleep(seconds)

    def _run(self, spec: ClusterSpec, key_digests: frozenset[bytes]) -> None:
        from tandem.cluster.ray.supervisor_process import serve_supervisor

        try:
            asyncio.run(serve_supervisor(spec, key_digests, self._face, self._ready.set))
        except BaseException:
            # Nothing here foresees it: end the process, and Ray starts the next supervisor, which adopts what runs.
            logging.getLogger(__name__).critical("the supervisor failed", exc_info=True)
            sys.stderr.flush()
            os._exit(1)


def make_actor(cls: type, **options: Any) -> Any:
    """Detached: it ends by a call or with its Ray cluster, not with the process that asked for it."""
    common = {"namespace": NAMESPACE, "lifetime": "detached", "num_cpus": 0}
    return ray.remote(cls).options(**{**common, **options})


def translate(error: BaseException) -> TandemError:
    """What an awaited call raised, as one of ours: Ray's border. Anything unknown is `InternalError`."""
    if isinstance(error, TandemError):
        return error
    cause: BaseException = getattr(error, "cause", None) or error
    if isinstance(cause, TandemError):
        return cause
    return InternalError(f"{type(cause).__name__}: {str(cause).strip()}")


def _worker_class(role: Role) -> type[WorkerProcess]:
    """Imported here, in the process that needs it: a worker loads torch, nothing else does."""
    if role is Role.PREFILL:
        from prefill_worker.worker import PrefillWorker

        return PrefillWorker
    from decode_worker.worker import DecodeWorker

    return DecodeWorker


def _model_dir(spec: ClusterSpec) -> Path:
    return Path(spec.model_dir) if spec.model_dir else resolve_model(spec.config.model.path)


def worker_host(spec: ClusterSpec) -> str:
    """The address of this node on which processes of the cluster listen for each other."""
    return "127.0.0.1" if spec.local else str(ray.util.get_node_ip_address())


def _begin(spec: ClusterSpec, name: str, role: PeerRole | None) -> None:
    """What every actor does first: its fate, its name, its log, and how its gRPC is secured."""
    _die_with_parent()
    points.name_process(name)
    _set_up_log(spec, name)
    if role is not None:
        configure(spec.config.security, role, worker_host(spec))


def _this_process() -> ActorState:
    pid = os.getpid()
    started = started_at(pid)
    assert started is not None
    return ActorState(ray.util.get_node_ip_address(), ray.get_runtime_context().get_node_id(), pid, started)


def _die_with_parent() -> None:
    """Let the kernel kill this process when its raylet dies.

    Else it would serve on for many seconds on a node that Ray has given up, beside its own replacement.
    """
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL)


def _set_up_log(spec: ClusterSpec, process: str) -> None:
    """Logs, and whatever else the process and its libraries print, go to one file for all lives of `process`.

    Without a directory they go where Ray puts an actor's output: its session directory on this node.
    """
    if spec.log_directory:
        directory = Path(spec.log_directory)
        directory.mkdir(parents=True, exist_ok=True)
        target = os.open(directory / f"{process}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(target, 1)
        os.dup2(target, 2)
        os.close(target)
    setup_logging(dataclasses.replace(spec.config.logging, directory=""), process)
