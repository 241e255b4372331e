"""The actor around a prefill or decode worker."""

from __future__ import annotations

import dataclasses
import logging
import os
import threading
from concurrent import futures
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tandem.cluster.ray.actor import ActorState, begin, model_dir_of, this_process, worker_host
from tandem.cluster.ray.home import session_directory
from tandem.cluster.ray.node_resources import kv_bytes_here
from tandem.cluster.spec import ClusterSpec
from tandem.core import fault_points, garbage
from tandem.core.errors import InternalError
from tandem.core.identity import WORKER_ROLES, Role
from tandem.core.pidfd import host_id
from tandem.rpc.permissions import PeerRole
from tandem.rpc.security import Security

if TYPE_CHECKING:
    from tandem.worker.process import NextLife, WorkerProcess
    from tandem.worker.step_engine import StepEngine

_log = logging.getLogger(__name__)


class WorkerActor:
    """One incarnation of a prefill or decode worker.

    Args:
        spec: of the whole cluster.
        role: "prefill" or "decode".
        num_threads: CPU threads, already in this process's `OMP_NUM_THREADS`.
    """

    def __init__(self, spec: ClusterSpec, role: str, worker_id: str, incarnation: str, num_threads: int) -> None:
        begin(spec, worker_id, PeerRole(role))
        self._spec, self._role = spec, Role(role)
        self._worker_id, self._incarnation, self._num_threads = worker_id, incarnation, num_threads
        self._engine: StepEngine | None = None  # that a life left to the next one
        self._started: Future[WorkerProcess[Any]] | None = None  # of this life; set with the first `start`
        if spec.config.pools.flexible:
            for each in WORKER_ROLES:
                Security(spec.config.security, PeerRole(each), worker_host(spec)).check()

    def state(self) -> ActorState:
        state = dataclasses.replace(this_process(), incarnation=self._incarnation)
        if self._started is None or not self._started.done() or self._started.exception() is not None:
            return state
        worker = self._started.result()
        return dataclasses.replace(state, address=worker.info.address, draining=worker.life.draining)

    def start(self, timeout_s: float) -> bool:
        """Load the model and listen, from the first call on; whether it listens, after at most `timeout_s`.

        Raises what prevented it.
        """
        if self._started is None:
            self._started = Future()
            threading.Thread(target=self._start, args=(self._started,), name="start", daemon=True).start()
        done, _ = futures.wait([self._started], timeout_s)
        for started in done:
            started.result()
        return bool(done)

    def wait_closed(self, timeout_s: float) -> bool:
        """Whether it has stopped, after at most `timeout_s`; stops it if that was asked for, and makes this process
        the worker of its next life if one was asked for. Raises what made it fail.

        To be called when it has started.
        """
        if self._started is None or not self._started.done():
            raise InternalError(f"{self._worker_id} has not been started")
        worker = self._started.result()
        if not worker.wait_closed(timeout_s):
            return False
        worker.stop()
        if worker.next_life is not None:
            self._change(worker, worker.next_life)
        return True

    def _change(self, worker: WorkerProcess[Any], then: NextLife) -> None:
        if (engine := worker.kept_engine) is None:
            _log.warning("%s ends, and is not %s: pages wait for unfinished writes", self._worker_id, then.worker_id)
            return
        fault_points.reach("worker.change_role")
        _log.info("%s goes on as %s", self._worker_id, then.worker_id)
        worker.orphan.end()
        self._engine, self._started = engine, None
        self._role, self._worker_id, self._incarnation = then.role, then.worker_id, then.incarnation
        begin(self._spec, then.worker_id, PeerRole(then.role))

    def _start(self, started: Future[WorkerProcess[Any]]) -> None:
        try:
            worker = self._make()
            worker.start()
            garbage.settle()
        except BaseException as error:  # noqa: BLE001 - handed to the caller of `start`
            started.set_exception(error)
        else:
            started.set_result(worker)
            if worker.orphan.wait():
                self._end_orphan(worker)

    def _end_orphan(self, worker: WorkerProcess[Any]) -> None:
        """Nobody is left who would ask for the end of this process."""
        alone_s = worker.orphan.orphan_s
        _log.critical("no supervisor and no router has been here for %g s: this worker ends itself", alone_s)
        try:
            worker.stop()
        finally:
            os._exit(0)  # the main thread may be in a call that nobody waits for

    def _make(self) -> WorkerProcess[Any]:
        from tandem.worker.parts import WorkerPlace
        from tandem.worker.process import WorkerProcess

        spec = self._spec
        pool, model_dir = getattr(spec.config.pools, self._role), model_dir_of(spec)
        place = WorkerPlace(
            worker_id=self._worker_id,
            incarnation=self._incarnation,
            model_dir=model_dir,
            kv_bytes=bytes_of_pages(spec, self._role, model_dir, is_kept=self._engine is not None),
            num_threads=self._num_threads,
            host=worker_host(spec),
            device="cuda" if pool.gpus else "cpu",
            # A session's directory may be shared by hosts, on a network drive.
            core_shares=session_directory() / f"tandem-core-shares-{host_id().replace('/', '-')}",
        )
        return WorkerProcess(_worker_class(self._role), spec.config, place, self._engine)


def bytes_of_pages(spec: ClusterSpec, role: Role, model_dir: Path, *, is_kept: bool) -> int:
    """What a life takes for KV pages; 0 where it goes on with an engine that `is_kept`, whose pages fill what it had.

    Raises:
        ConfigError: nothing is left for pages.
    """
    if is_kept:
        return 0
    return spec.kv_bytes[role] or kv_bytes_here(spec.config, role, model_dir)


def _worker_class(role: Role) -> type[Any]:
    """Imported here, in the process that needs it: a worker loads torch, nothing else does."""
    if role is Role.PREFILL:
        from prefill_worker.worker import PrefillWorker

        return PrefillWorker
    from decode_worker.worker import DecodeWorker

    return DecodeWorker
