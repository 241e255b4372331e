"""Ray behind the supervisor's handles: named, detached actors placed by the resources `prefill` and `decode`."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import threading
from collections.abc import Awaitable, Sequence
from typing import Any, TypeVar, cast

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from tandem.cluster.ray import kv_store
from tandem.cluster.ray.actor import WAIT_SLICE_S, ActorState, make_actor, translate
from tandem.cluster.ray.node_resources import threads_for
from tandem.cluster.ray.router_actor import RouterActor
from tandem.cluster.ray.watchers import WATCHER, NodeWatchers
from tandem.cluster.ray.worker_actor import WorkerActor
from tandem.cluster.spec import NAMESPACE, ClusterSpec, SupervisorFace
from tandem.cluster.supervisor.events import Drain, Intent, Placement
from tandem.cluster.supervisor.handles import Found, FoundRouter, FoundWorker, Memory, WorkerState
from tandem.core.errors import WorkerLostError
from tandem.core.identity import Role
from tandem.core.pidfd import ProcessId
from tandem.rpc.v1 import common_pb2

_log = logging.getLogger(__name__)

_T = TypeVar("_T")


def as_kept(node_id: str, processes: Sequence[ProcessId]) -> dict[str, Any]:
    """Processes of a node, as plain data for later supervisors."""
    return {"node_id": node_id, "processes": [dataclasses.astuple(process) for process in processes]}


def kept_of(node_id: str, kept: dict[str, Any] | None) -> list[ProcessId]:
    """Those of this node. Whether one of another node has ended, which may be cut off, cannot be judged here."""
    if kept is None or kept["node_id"] != node_id:
        return []
    return [ProcessId(*process) for process in kept["processes"]]


class _RayHandle:
    """An actor and, once it is placed, its process. `name`: place and incarnation."""

    def __init__(self, actor: Any, name: str, watchers: NodeWatchers) -> None:
        self._actor, self._name, self._watchers = actor, name, watchers
        self._place: tuple[str, ProcessId] | None = None  # Ray's id of its node, and the process there

    async def wait_closed(self) -> None:
        while not await self._call(self._actor.wait_closed.remote(WAIT_SLICE_S)):
            pass  # still running: ask again

    async def wait_ended(self) -> None:
        if self._place is None:
            raise WorkerLostError(f"nobody knows where {self._name} runs")
        await self._watchers.wait_ended(*self._place)

    async def kill(self) -> None:
        """Ray reports a killed actor dead at once, but a process that does not react would live on for seconds: its
        node's watcher ends it."""
        ray.kill(self._actor, no_restart=True)
        if self._place is not None:
            await self._watchers.kill(*self._place)

    async def _ask_state(self) -> ActorState:
        state = await self._call(cast(Awaitable[ActorState], self._actor.state.remote()))
        self._place = state.node_id, ProcessId(self._name, state.pid, state.started)
        await self._watchers.meet(*self._place)
        return state

    async def _call(self, ref: Awaitable[_T]) -> _T:
        """Await an actor call; Ray's errors become ours here and nowhere else."""
        try:
            return await ref
        except RayActorError as error:
            raise WorkerLostError(f"{self._name.partition('.')[0]}: {_reason(error)}") from error
        except RayError as error:
            raise translate(error) from error


class RayWorker(_RayHandle):
    async def state(self) -> WorkerState:
        return _worker_state(await self._ask_state())

    async def start(self) -> WorkerState:
        while not await self._call(self._actor.start.remote(WAIT_SLICE_S)):
            pass  # it loads: ask again
        return await self.state()


class RayRouter(_RayHandle):
    async def place(self) -> None:
        await self._ask_state()

    async def start(self) -> tuple[str, str]:
        return cast(tuple[str, str], await self._call(self._actor.start.remote()))


class RayLauncher:
    """Implements `tandem.cluster.supervisor.handles.Launcher`; runs inside the supervisor's actor."""

    def __init__(self, spec: ClusterSpec, key_digests: frozenset[bytes]) -> None:
        self._spec, self._key_digests = spec, key_digests
        self._watchers = NodeWatchers(spec, self._keep_processes)
        self._memory = threading.Lock()
        self._over = False  # guarded by `_memory`: nothing is remembered any more

    def start_worker(self, role: Role, worker_id: str, incarnation: str) -> RayWorker:
        pool = getattr(self._spec.config.pools, role)
        num_threads = self._spec.num_threads[role] or threads_for(role)
        name = f"{worker_id}.{incarnation}"
        actor = make_actor(
            WorkerActor,
            name=name,
            resources={role.value: 1},
            num_gpus=pool.gpus,
            # Waiting threads sleep: where workers share cores, spinning made a prefill of 400 tokens 25 times slower.
            runtime_env={"env_vars": {"OMP_NUM_THREADS": str(num_threads), "OMP_WAIT_POLICY": "passive"}},
        ).remote(self._spec, role.value, worker_id, incarnation, num_threads)
        return RayWorker(actor, name, self._watchers)

    def start_router(self, name: str, incarnation: str) -> RayRouter:
        on_its_node = NodeAffinitySchedulingStrategy(self._spec.node_id, soft=False)
        name = f"{name}.{incarnation}"
        actor = make_actor(RouterActor, name=name, scheduling_strategy=on_its_node)
        return RayRouter(actor.remote(self._spec, self._key_digests), name, self._watchers)

    def find(self) -> Found:
        workers, routers, watchers = list[FoundWorker](), list[FoundRouter](), []
        for name in ray.util.list_named_actors():
            place, _, incarnation = name.partition(".")
            if not incarnation:
                continue
            try:
                actor = ray.get_actor(name, namespace=NAMESPACE)
            except ValueError:
                continue  # died since it was listed
            if place == WATCHER:
                watchers.append((incarnation, actor))
            elif (role := _role_of(place)) is Role.ROUTER:
                routers.append(FoundRouter(place, incarnation, RayRouter(actor, name, self._watchers)))
            else:
                workers.append(FoundWorker(role, place, incarnation, RayWorker(actor, name, self._watchers)))
        kept = kept_of(self._spec.node_id, kv_store.recall().get("processes"))
        ended = [name.partition(".") for name in self._watchers.adopt(watchers, kept)]
        ended_workers = [incarnation for place, _, incarnation in ended if _role_of(place) is not Role.ROUTER]
        return Found(workers, routers, ended_workers)

    def begin_term(self) -> Memory:
        kept = kv_store.recall()
        term = int(kept.get("term", 0)) + 1
        self._remember(term=term)
        return Memory(term, _read_intent(kept["intent"]) if "intent" in kept else None)

    def remember(self, intent: Intent) -> None:
        self._remember(intent=dataclasses.asdict(intent))

    def _keep_processes(self, processes: Sequence[ProcessId]) -> None:
        self._remember(processes=as_kept(self._spec.node_id, processes))

    def _remember(self, **changed: Any) -> None:
        with self._memory:
            if not self._over:  # else the next cluster in this Ray would take it for its own
                kv_store.remember(**changed)

    def remember_face(self, face: SupervisorFace) -> None:
        """For whoever looks for this supervisor, whose actor answers late: it rests."""
        self._remember(face=dataclasses.asdict(face))

    async def rest(self) -> None:
        """Keep the supervisor's own actor in calls until this is cancelled: see `tandem.cluster.ray.actor`."""
        actor = ray.get_runtime_context().current_actor
        while True:
            try:
                await actor.rest.remote(WAIT_SLICE_S)
            except RayError as error:  # it costs some wake-ups, and nothing else
                _log.warning("the supervisor's actor does not rest: %s", translate(error).message)
                await asyncio.sleep(WAIT_SLICE_S)

    def end_self(self) -> None:
        """End the watchers and the supervisor's own actor for good, and forget what was remembered."""
        self._watchers.end()
        with self._memory:
            self._over = True
            kv_store.forget()
        ray.kill(ray.get_runtime_context().current_actor, no_restart=True)


def _role_of(place: str) -> Role:
    """Of the slot with this name."""
    return Role(place.rpartition("-")[0])


def _worker_state(state: ActorState) -> WorkerState:
    address = common_pb2.WorkerInfo.FromString(state.info).address if state.info else ""
    return WorkerState(address, Placement(state.node, state.pid), state.draining)


def _reason(error: RayActorError) -> str:
    """The sentence in Ray's message that says why; the rest lists ids."""
    text = str(error).strip()
    if isinstance(error, ActorUnavailableError):
        return "the connection to its process broke"
    if "connection error code" in text:  # the socket to its raylet broke: the kernel or a crash ended the process
        return "its process was killed or crashed"
    for line in text.splitlines():
        if "exit detail:" in line:
            return line.split("exit detail:", 1)[1].split("Some common causes")[0].strip().rstrip(".")
    return text.splitlines()[-1].strip() if text else type(error).__name__


def _read_intent(kept: dict[str, Any]) -> Intent:
    return Intent(
        wanted={Role(role): size for role, size in kept["wanted"].items()},
        drains={worker_id: Drain(**drain) for worker_id, drain in kept["drains"].items()},
        failures=kept["failures"],
        closing_s=kept["closing_s"],
    )
