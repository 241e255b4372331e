"""Ray behind `tandem.cluster.handles`: named, detached actors placed by the resources `prefill` and `decode`."""

from __future__ import annotations

import json
import logging
import os
import signal
from collections.abc import Awaitable
from typing import Any, TypeVar, cast

import psutil
import ray
from ray.exceptions import RayActorError, RayError
from ray.experimental import internal_kv
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from tandem.cluster.actors import MAX_CONCURRENCY, ActorState, RouterActor, SupervisorActor, WorkerActor, translate
from tandem.cluster.events import Placement, Role
from tandem.cluster.handles import Found, FoundWorker, Memory, WorkerState
from tandem.cluster.node_share import threads_for
from tandem.cluster.spec import NAMESPACE, SUPERVISOR_NAME, ClusterSpec
from tandem.core.errors import WorkerLostError
from tandem.rpc.v1 import common_pb2

log = logging.getLogger(__name__)

_T = TypeVar("_T")
_MEMORY_KEY = b"supervisor"
_WAIT_SLICE_S = 30.0


class _RayHandle:
    """An actor and, once it is placed, its process."""

    def __init__(self, actor: Any, name: str) -> None:
        self._actor, self._name = actor, name

    async def wait_closed(self) -> None:
        while not await self._call(self._actor.wait_closed.remote(_WAIT_SLICE_S)):
            pass  # still running: ask again

    async def stop(self) -> None:
        await self._call(self._actor.stop.remote())

    def kill(self) -> None:
        ray.kill(self._actor, no_restart=True)

    async def _call(self, ref: Awaitable[_T]) -> _T:
        """Await an actor call; Ray's errors become ours here and nowhere else."""
        try:
            return await ref
        except RayActorError as error:
            raise WorkerLostError(f"{self._name}: {_reason(error)}") from error
        except RayError as error:
            raise translate(error) from error


class RayWorker(_RayHandle):
    def __init__(self, actor: Any, name: str) -> None:
        super().__init__(actor, name)
        self._state: ActorState | None = None

    async def state(self) -> WorkerState:
        return self._seen(await self._call(self._actor.state.remote()))

    async def start(self) -> WorkerState:
        return self._seen(await self._call(self._actor.start.remote()))

    async def drain(self) -> None:
        await self._call(self._actor.drain.remote())

    def kill(self, *, unresponsive: bool = False) -> None:
        """Ray reports a killed actor dead at once, but a process that does not react lives on for 5 s: on this node
        it gets its SIGKILL from here."""
        super().kill()
        if unresponsive and self._state and self._state.node_id == ray.get_runtime_context().get_node_id():
            _kill_sibling(self._state.pid)

    def _seen(self, state: ActorState) -> WorkerState:
        self._state = state
        address = common_pb2.WorkerInfo.FromString(state.info).address if state.info else ""
        return WorkerState(address, Placement(state.node, state.pid), state.draining)


class RayRouter(_RayHandle):
    async def start(self) -> tuple[str, str]:
        return cast(tuple[str, str], await self._call(self._actor.start.remote()))


class RayLauncher:
    """Implements `tandem.cluster.handles.Launcher`; runs inside the supervisor's actor."""

    def __init__(self, spec: ClusterSpec) -> None:
        self._spec = spec

    def start_worker(self, role: Role, worker_id: str, incarnation: str) -> RayWorker:
        pool = getattr(self._spec.config.pools, role)
        num_threads = self._spec.num_threads[role] or threads_for(role)
        actor = _actor(
            WorkerActor,
            name=f"{worker_id}.{incarnation}",
            resources={role.value: 1},
            num_gpus=pool.gpus,
            # Waiting threads sleep: where workers share cores, spinning made a prefill of 400 tokens 25 times slower.
            runtime_env={"env_vars": {"OMP_NUM_THREADS": str(num_threads), "OMP_WAIT_POLICY": "passive"}},
        ).remote(self._spec, role.value, worker_id, incarnation, num_threads)
        return RayWorker(actor, worker_id)

    def start_router(self, incarnation: str) -> RayRouter:
        on_its_node = NodeAffinitySchedulingStrategy(self._spec.node_id, soft=False)
        actor = _actor(RouterActor, name=f"router.{incarnation}", scheduling_strategy=on_its_node)
        return RayRouter(actor.remote(self._spec), "router")

    def find(self) -> Found:
        workers, router = [], None
        for name in ray.util.list_named_actors():
            place, _, incarnation = name.partition(".")
            if not incarnation:
                continue
            try:
                actor = ray.get_actor(name, namespace=NAMESPACE)
            except ValueError:
                continue  # died since it was listed
            if place == "router":
                router = (incarnation, RayRouter(actor, place))
            else:
                worker = RayWorker(actor, place)
                workers.append(FoundWorker(Role(place.rpartition("-")[0]), place, incarnation, worker))
        return Found(workers, router)

    def begin_term(self) -> Memory:
        kept = _recall()
        term = int(kept.get("term", 0)) + 1
        _remember({**kept, "term": term})
        wanted = kept.get("wanted")
        return Memory(term, {Role(role): size for role, size in wanted.items()} if wanted else None)

    def remember_wanted(self, wanted: dict[Role, int]) -> None:
        _remember({**_recall(), "wanted": wanted})

    def end_self(self) -> None:
        """End the supervisor's own actor for good and forget what was for its successors."""
        internal_kv._internal_kv_del(_MEMORY_KEY, namespace=NAMESPACE)
        ray.kill(ray.get_runtime_context().current_actor, no_restart=True)


def start_supervisor(spec: ClusterSpec) -> Any:
    """The supervisor's actor, on the node of the spec. Its own death never ends it: Ray starts it again."""
    return _actor(
        SupervisorActor,
        name=SUPERVISOR_NAME,
        max_restarts=-1,
        max_task_retries=-1,
        scheduling_strategy=NodeAffinitySchedulingStrategy(spec.node_id, soft=False),
    ).remote(spec)


def _actor(cls: type, **options: Any) -> Any:
    """Detached: it ends by a call or with its Ray cluster, not with the process that asked for it."""
    common = {"namespace": NAMESPACE, "lifetime": "detached", "num_cpus": 0, "max_concurrency": MAX_CONCURRENCY}
    return ray.remote(cls).options(**{**common, **options})


def _kill_sibling(pid: int) -> None:
    """SIGKILL, if `pid` is still a process of this node's raylet and not a later one with the same number."""
    try:
        if psutil.Process(pid).ppid() == os.getppid():
            os.kill(pid, signal.SIGKILL)
    except (psutil.NoSuchProcess, ProcessLookupError):
        log.debug("process %d has ended already", pid)


def _reason(error: RayActorError) -> str:
    """The sentence in Ray's message that says why; the rest lists ids."""
    text = str(error).strip()
    if "connection error code" in text:  # the socket to its raylet broke: the kernel or a crash ended the process
        return "its process was killed or crashed"
    for line in text.splitlines():
        if "exit detail:" in line:
            return line.split("exit detail:", 1)[1].split("Some common causes")[0].strip().rstrip(".")
    return text.splitlines()[-1].strip() if text else type(error).__name__


def _recall() -> dict[str, Any]:
    """What the supervisors keep in Ray's control store (it lives as long as the cluster)."""
    kept = internal_kv._internal_kv_get(_MEMORY_KEY, namespace=NAMESPACE)
    return json.loads(kept) if kept else {}


def _remember(data: dict[str, Any]) -> None:
    internal_kv._internal_kv_put(_MEMORY_KEY, json.dumps(data).encode(), overwrite=True, namespace=NAMESPACE)
