"""Ray behind the supervisor's handles: named, detached actors placed by the resources `prefill`, `decode`, `router`."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import threading
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar, cast

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from tandem.cluster.ray import kv_store
from tandem.cluster.ray.actor import WAIT_SLICE_S, ActorState, make_actor, pinned, translate
from tandem.cluster.ray.builds import environment_for, forget_wheels, keep_wheel
from tandem.cluster.ray.node_resources import list_nodes, threads_for
from tandem.cluster.ray.router_actor import RouterActor
from tandem.cluster.ray.router_nodes import choose_node, nodes_for_routers
from tandem.cluster.ray.watchers import WATCHER, NodeWatchers
from tandem.cluster.ray.worker_actor import WorkerActor
from tandem.cluster.spec import NAMESPACE, ClusterSpec, SupervisorFace
from tandem.cluster.supervisor.autoscale import Range
from tandem.cluster.supervisor.events import Build, Drain, Intent, NextLife, Placement
from tandem.cluster.supervisor.handles import Found, Memory, ProcessState
from tandem.cluster.supervisor.nodes import Aim, Node
from tandem.cluster.supervisor.slots import place_of
from tandem.core.errors import WorkerLostError
from tandem.core.identity import WORKER_ROLES, Role
from tandem.core.machine import HostBoot
from tandem.core.pidfd import ProcessId
from tandem.rpc.security import is_loopback

_log = logging.getLogger(__name__)

KNOCK_S = 2.0
"""How long a node may take to take a connection: one lost packet is sent again in that time."""

WORKER_ENVIRONMENT = {
    # Waiting threads sleep: where workers share cores, spinning made a prefill of 400 tokens 25 times slower.
    "OMP_WAIT_POLICY": "passive",
    # The store of torch.distributed asks DNS for the name of whoever connects, for its logs. For an answer that was
    # lost the C library waits 5 s else: half of what a transfer has.
    "RES_OPTIONS": "timeout:1 attempts:2",
}

_T = TypeVar("_T")


def as_kept(node_id: str, processes: Sequence[ProcessId]) -> dict[str, Any]:
    """Processes of a node, as plain data for later supervisors."""
    return {node_id: [dataclasses.astuple(process) for process in processes]}


def kept_of(node_id: str, kept: dict[str, Any] | None) -> list[ProcessId]:
    """Those of this node. The end of a process of another node, which may be cut off, cannot be judged here."""
    return [ProcessId(*process) for process in (kept or {}).get(node_id, [])]


class RayHandle:
    """An actor, named by slot and incarnation, and, once it is placed, its process."""

    def __init__(self, actor: Any, actor_name: str, watchers: NodeWatchers, lives: Lives, life: str = "") -> None:
        """`life`: name and incarnation that its process has now; empty: those under which it was started."""
        self._actor, self._actor_name, self._watchers, self._lives = actor, actor_name, watchers, lives
        self.name, _, self.incarnation = (life or actor_name).partition(".")
        self.role, self.seat = place_of(self.name)[0], place_of(actor_name.partition(".")[0])[0]
        self._place: tuple[str, ProcessId] | None = None  # Ray's id of its node, and the process there

    async def state(self) -> ProcessState:
        state = await self._call(cast(Awaitable[ActorState], self._actor.state.remote()))
        if state.incarnation not in ("", self.incarnation):
            raise WorkerLostError(f"{self.name}: its process goes on as another")
        self._place = state.node_id, ProcessId(self._actor_name, state.pid, state.started)
        self._watchers.locate(state.node_id, state.node)
        await self._watchers.meet(*self._place)
        placement = Placement(state.node, state.pid, state.node_id, state.boot)
        return ProcessState(state.address, state.url, placement, state.draining)

    async def start(self) -> ProcessState:
        while not await self._call(self._actor.start.remote(WAIT_SLICE_S)):
            pass  # it loads: ask again
        return await self.state()

    async def wait_closed(self) -> None:
        while not await self._call(self._actor.wait_closed.remote(WAIT_SLICE_S)):
            pass  # still running: ask again

    async def next_life(self, then: NextLife) -> RayHandle | None:
        state = await self._call(cast(Awaitable[ActorState], self._actor.state.remote()))
        if state.incarnation != then.incarnation:
            return None
        life = f"{then.worker_id}.{then.incarnation}"
        await asyncio.to_thread(self._lives.note, self._actor_name, life)
        return RayHandle(self._actor, self._actor_name, self._watchers, self._lives, life)

    async def wait_ended(self) -> None:
        if self._place is None:
            raise WorkerLostError(f"nobody knows where {self._actor_name} runs")
        await self._watchers.wait_ended(*self._place)

    async def kill(self) -> None:
        """Ray reports a killed actor dead at once, but a process that does not react would live on for seconds: its
        node's watcher ends it."""
        works = [asyncio.to_thread(ray.kill, self._actor, no_restart=True)]
        if self._place is not None:
            works.append(self._watchers.kill(*self._place))
        await asyncio.gather(*works)

    async def _call(self, ref: Awaitable[_T]) -> _T:
        """Await an actor call; Ray's errors become ours here and nowhere else."""
        try:
            return await ref
        except RayActorError as error:
            raise WorkerLostError(f"{self.name}: {_reason(error)}") from error
        except RayError as error:
            raise translate(error) from error


class Lives:
    """As what the processes of actors go on that no longer are what they were started as, kept for later supervisors.

    Args:
        keep: called in a thread with all of them, by the actor's name.
    """

    def __init__(self, keep: Callable[[dict[str, str]], None]) -> None:
        self._keep = keep
        self._known: dict[str, str] = {}
        self._noting = threading.Lock()

    def note(self, actor_name: str, life: str) -> None:
        with self._noting:
            self._known[actor_name] = life
            self._keep(dict(self._known))

    def adopt(self, kept: Mapping[str, str], alive: Collection[str]) -> None:
        """Of an earlier supervisor, those that are alive still."""
        self._known = {name: life for name, life in kept.items() if name in alive}

    def of(self, actor_name: str) -> str:
        """Name and incarnation, as an actor's name has them."""
        return self._known.get(actor_name, actor_name)


class RayLauncher:
    """Implements `tandem.cluster.supervisor.handles.Launcher`; runs inside the supervisor's actor."""

    def __init__(self, spec: ClusterSpec, key_digests: frozenset[bytes]) -> None:
        self._spec, self._key_digests = spec, key_digests
        self._watchers = NodeWatchers(spec, self._keep_processes)
        self._lives = Lives(lambda lives: self._remember(lives=lives))
        self._memory = threading.Lock()
        self._over = False  # guarded by `_memory`: nothing is remembered any more
        self._placing = threading.Lock()
        # Ray's id of the node of each router's newest life, by slot; kept for later supervisors. Guarded by `_placing`.
        self._router_nodes: dict[str, str] = {}

    def start(
        self, role: Role, name: str, incarnation: str, beside: Sequence[str], build: Build, aim: Aim
    ) -> RayHandle:
        actor_name = f"{name}.{incarnation}"
        try:
            actor = self._ask_for(actor_name, role, beside, build, aim)
        except Exception as error:  # Ray has many ways to say that it will not
            raise translate(error) from error
        return RayHandle(actor, actor_name, self._watchers, self._lives)

    def _ask_for(self, actor_name: str, role: Role, beside: Sequence[str], build: Build, aim: Aim) -> Any:
        name, _, incarnation = actor_name.partition(".")
        if role is Role.ROUTER:
            where = pinned(*self._node_of_router(name, beside, aim))
            asked = make_actor(RouterActor, name=actor_name, runtime_env=environment_for(build, {}), **where)
            return asked.remote(self._spec, name, self._key_digests)
        num_threads = self._spec.num_threads[role] or threads_for(role)
        asked = make_actor(
            WorkerActor,
            name=actor_name,
            resources={role.value: 1},
            **_where(aim),
            num_gpus=getattr(self._spec.config.pools, role).gpus,
            runtime_env=environment_for(build, {"OMP_NUM_THREADS": str(num_threads), **WORKER_ENVIRONMENT}),
        )
        return asked.remote(self._spec, role.value, name, incarnation, num_threads)

    def _node_of_router(self, name: str, beside: Sequence[str], aim: Aim) -> tuple[str, str]:
        """Its id and address. Where nobody but programs of its own host can reach a router: the host of `tandem serve`.

        A node that does not answer is taken only where there is no other.
        """
        with self._placing:
            others = [self._router_nodes[other] for other in beside if other in self._router_nodes]
            is_reached = not is_loopback(self._spec.config.http.host)
            listed = ray.nodes() if is_reached else []
            nodes = nodes_for_routers(listed, self._spec.node_id)
            nodes = [node for node in nodes if node not in aim.avoid] or nodes
            node = self._router_nodes[name] = choose_node(nodes, others, self._router_nodes.get(name))
            self._remember(routers=dict(self._router_nodes))
        addresses = {each["NodeID"]: str(each["NodeManagerAddress"]) for each in listed}
        return node, addresses.get(node) or str(ray.util.get_node_ip_address())

    def nodes(self) -> Sequence[Node]:
        return [] if self._spec.local else list_nodes()

    async def knock(self, node: Node) -> bool:
        try:
            async with asyncio.timeout(KNOCK_S):
                _, writer = await asyncio.open_connection(node.address, node.port)
        except (OSError, TimeoutError):
            return False
        writer.close()
        return True

    async def meet(self, node: Node) -> HostBoot:
        self._watchers.locate(node.node_id, node.address)
        return await self._watchers.boot_of(node.node_id)

    def find(self) -> Found:
        processes, watchers = list[RayHandle](), list[tuple[str, Any]]()
        names, kept = ray.util.list_named_actors(), kv_store.recall()
        lives: dict[str, str] = kept.get("lives", {})
        self._lives.adopt(lives, names)
        for name in names:
            place, _, incarnation = name.partition(".")
            if not incarnation:
                continue
            try:
                actor = ray.get_actor(name, namespace=NAMESPACE)
            except ValueError:
                continue  # died since it was listed
            if place == WATCHER:
                watchers.append((incarnation, actor))
            else:
                processes.append(RayHandle(actor, name, self._watchers, self._lives, self._lives.of(name)))
        here = kept_of(self._spec.node_id, kept.get("processes"))
        gone = self._watchers.adopt(watchers, here)
        ended = [name.partition(".") for name in (*gone, *(lives[name] for name in gone if name in lives))]
        return Found(processes, [life for place, _, life in ended if place_of(place)[0] in WORKER_ROLES])

    def begin_term(self) -> Memory:
        kept = kv_store.recall()
        term = int(kept.get("term", 0)) + 1
        self._remember(term=term)
        self._router_nodes = kept.get("routers", {})
        return Memory(term, _read_intent(kept["intent"]) if "intent" in kept else None)

    def keep_build(self, build: Build, wheel: bytes, before: Build) -> None:
        keep_wheel(build, wheel)
        forget_wheels(but=[build, before])

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

    async def end_self(self) -> None:
        """End the watchers and the supervisor's own actor for good, and forget what was remembered."""
        await self._watchers.end()
        with self._memory:
            self._over = True
            kv_store.forget()
            forget_wheels()
        ray.kill(ray.get_runtime_context().current_actor, no_restart=True)


def _where(aim: Aim) -> dict[str, Any]:
    """Options of an actor that is to run there. Where no node is known, Ray finds one, or has it added."""
    if aim.node_id:
        return {"scheduling_strategy": NodeAffinitySchedulingStrategy(aim.node_id, soft=False)}
    return {"label_selector": {"ray.io/node-id": f"!in({','.join(sorted(aim.avoid))})"}} if aim.avoid else {}


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
        build=Build(**kept["build"]),
        build_before=Build(**kept["build_before"]),
        builds={life: Build(**build) for life, build in kept["builds"].items()},
        ranges={Role(role): Range(**bounds) for role, bounds in kept.get("ranges", {}).items()},
        unproven={incarnation: HostBoot(**boot) for incarnation, boot in kept.get("unproven", {}).items()},
        colocated=kept.get("colocated", False),
    )
