"""The Ray actors: thin shells around processes that also run without Ray.

Each blocks in threads of its own (Ray runs calls of a plain actor class in a thread pool); none holds any logic.
Ray sets `OMP_NUM_THREADS` and takes the signals, so threads come with the actor's environment and stopping is a call.
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
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import ray

from tandem.cluster.events import Role
from tandem.cluster.node_share import kv_bytes_here
from tandem.cluster.spec import NAMESPACE, SUPERVISOR_NAME, ClusterSpec
from tandem.core.errors import InternalError, TandemError
from tandem.core.logging import setup_logging
from tandem.core.model_path import resolve_model

if TYPE_CHECKING:
    from router.worker_key import WorkerKey
    from tandem.cluster.supervisor import Supervisor
    from tandem.worker.process import WorkerProcess

MAX_CONCURRENCY = 8
"""Calls that one actor serves at a time. Waiting for its end is asked in slices: a supervisor that died leaves no
call behind that would occupy a place for ever."""

ROUTER_DRAIN_S = 2.0
"""For requests whose workers stop at the same time: to end in a typed error instead of a broken connection."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ActorState:
    """What a worker actor says of itself. `info`: a serialised `WorkerInfo`, empty while it loads."""

    node: str
    node_id: str
    pid: int
    info: bytes
    draining: bool


class WorkerActor:
    """One incarnation of a prefill or decode worker.

    Args:
        spec: of the whole cluster.
        role: "prefill" or "decode".
        num_threads: CPU threads, already in this process's `OMP_NUM_THREADS`.
    """

    def __init__(self, spec: ClusterSpec, role: str, worker_id: str, incarnation: str, num_threads: int) -> None:
        _die_with_parent()
        _set_up_log(spec, worker_id)
        self._spec, self._role = spec, Role(role)
        self._worker_id, self._incarnation, self._num_threads = worker_id, incarnation, num_threads
        self._starting = threading.Lock()
        self._worker: WorkerProcess | None = None
        self._info = b""
        self._draining = False

    def state(self) -> ActorState:
        context = ray.get_runtime_context()
        return ActorState(
            ray.util.get_node_ip_address(), context.get_node_id(), os.getpid(), self._info, self._draining
        )

    def start(self) -> ActorState:
        """Load the model and listen; idempotent, so that a restarted supervisor can ask again."""
        with self._starting:
            if self._worker is None:
                worker = self._make()
                self._info = worker.start().SerializeToString()
                self._worker = worker
        return self.state()

    def wait_closed(self, timeout_s: float) -> bool:
        """Whether it has stopped, after at most `timeout_s`. Raises what made it fail."""
        return self._running().wait_closed(timeout_s)

    def drain(self) -> None:
        self._draining = True
        self._running().drain()

    def stop(self) -> None:
        self._running().stop()

    def _running(self) -> WorkerProcess:
        if self._worker is None:
            raise InternalError(f"{self._worker_id} has not been started")
        return self._worker

    def _make(self) -> WorkerProcess:
        spec = self._spec
        pool = getattr(spec.config.pools, self._role)
        return _worker_class(self._role)(
            spec.config,
            worker_id=self._worker_id,
            incarnation=self._incarnation,
            model_dir=_model_dir(spec),
            kv_bytes=spec.kv_bytes[self._role] or kv_bytes_here(spec.config, self._role),
            num_threads=self._num_threads,
            host=_host(spec),
            device="cuda" if pool.gpus else "cpu",
        )


class RouterActor:
    """One incarnation of the router."""

    def __init__(self, spec: ClusterSpec) -> None:
        from router.server import RouterServer

        _die_with_parent()
        _set_up_log(spec, "router")
        http = spec.config.http
        self._server = RouterServer(
            spec.config,
            model_dir=_model_dir(spec),
            host=http.host,
            http_port=http.port,
            on_writer_suspected=_tell_supervisor,
        )
        self._starting = threading.Lock()
        self._addresses: tuple[str, str] | None = None

    def start(self) -> tuple[str, str]:
        """Listen; URL for clients and address of RouterControl. Idempotent."""
        with self._starting:
            if self._addresses is None:
                info = self._server.start()
                self._addresses = info.http_url, info.control_address
            return self._addresses

    def wait_closed(self, timeout_s: float) -> bool:
        """Whether it has stopped, after at most `timeout_s`."""
        return self._server.wait_closed(timeout_s)

    def stop(self) -> None:
        self._server.stop(drain_s=ROUTER_DRAIN_S)


class SupervisorActor:
    """Runs `tandem.cluster.supervisor` in an event loop of its own; Ray starts it again whenever it dies."""

    def __init__(self, spec: ClusterSpec) -> None:
        _die_with_parent()
        _set_up_log(spec, "supervisor")
        self._ready = threading.Event()
        self._address = ""
        self._supervisor: Supervisor
        threading.Thread(target=self._run, args=(spec,), name="supervisor", daemon=True).start()

    def wait_ready(self) -> str:
        """Until it serves; the address of SupervisorControl."""
        self._ready.wait()
        return self._address

    def suspect(self, worker_id: str, incarnation: str) -> None:
        """A decode worker says that this writer has fallen silent beyond its lease: it must be killed on its node."""
        self._ready.wait()
        self._supervisor.suspect(worker_id, incarnation)

    def _run(self, spec: ClusterSpec) -> None:
        from tandem.cluster.supervisor_process import serve_supervisor

        try:
            asyncio.run(serve_supervisor(spec, _host(spec), self._listening))
        except BaseException:
            # Nothing here foresees it: end the process, and Ray starts the next supervisor, which adopts what runs.
            logging.getLogger(__name__).critical("the supervisor failed", exc_info=True)
            sys.stderr.flush()
            os._exit(1)

    def _listening(self, address: str, supervisor: Supervisor) -> None:
        self._address, self._supervisor = address, supervisor
        self._ready.set()


def _tell_supervisor(writer: WorkerKey) -> None:
    """Called on the router's thread; the call to the actor does not block."""
    log.warning("writer %s is suspected", writer)
    ray.get_actor(SUPERVISOR_NAME, namespace=NAMESPACE).suspect.remote(writer.worker_id, writer.incarnation)


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


def _host(spec: ClusterSpec) -> str:
    return "127.0.0.1" if spec.local else str(ray.util.get_node_ip_address())


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
