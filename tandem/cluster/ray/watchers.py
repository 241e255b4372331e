"""The supervisor's side of the node watchers: one on each node where a process of ours runs.

On its own node the supervisor watches by itself: a process less that has to run. What it has watched there it keeps
for its successor, who judges by number and start whether a process has ended meanwhile.

On any other node the watcher is an actor. It is made when the first process of its node is known and ends some time
after the last one has: an actor, even one without CPUs, keeps the autoscaler from giving a node back. It outlives the
supervisor, and the next one asks it what has ended meanwhile. Its state is not worth keeping: a process is named so
that any later watcher can judge it.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayError, RayTaskError

from tandem.cluster.ray.actor import make_actor, pinned
from tandem.cluster.ray.node_watcher import NodeWatcher, WatcherActor
from tandem.cluster.spec import ClusterSpec
from tandem.core.errors import WorkerLostError
from tandem.core.machine import HostBoot, this_boot
from tandem.core.pidfd import ProcessId, has_ended

_log = logging.getLogger(__name__)

WATCHER = "watcher"
"""First part of the actors' names; node and a number that is new each time follow."""

_SLICE_S = 30.0
_SLACK_S = 10.0  # a watcher that is so late with an answer is itself stopped or stuck
_KILL_S = 5.0
_MEET_S = 30.0  # a watcher may have to be started first
_RETRY_S = 0.2
_LINGER_S = 20.0
_ADOPT_S = 5.0
_MAX_CALLS = 1000  # coroutines that wait, one for each process of a node
_KEEP_S = 5.0
_MAX_KEPT = 256  # of this node's processes; more only while more than these run


@dataclass
class _Node:
    """`ending` is set once nobody uses the watcher any more."""

    actor: Any
    num_users: int = 0
    ending: asyncio.TimerHandle | None = None


class NodeWatchers:
    """Asks the watcher of a process's node, and has one made where there is none.

    To make an actor or to end it waits for Ray's control store: in a thread, for heartbeats are heard meanwhile.

    Args:
        keep: called in a thread with the processes of this node that a later supervisor must be able to judge.
    """

    def __init__(self, spec: ClusterSpec, keep: Callable[[Sequence[ProcessId]], None]) -> None:
        self._spec, self._keep = spec, keep
        self._here = NodeWatcher()
        self._nodes: dict[str, _Node] = {}  # by Ray's node id
        self._making: dict[str, asyncio.Task[_Node]] = {}  # by node id; all that ask meanwhile wait for the same one
        self._ending: set[asyncio.Task[None]] = set()
        self._addresses: dict[str, str] = {}  # of the nodes that were ever asked about
        self._kills: dict[str, asyncio.Future[None]] = {}  # under way, by the process's name
        self._kept: dict[str, ProcessId] = {}  # by name, oldest first
        self._is_kept = True  # `keep` has had all of them
        self._keeping = asyncio.Lock()  # an older state must not be written over a newer one

    def locate(self, node_id: str, address: str) -> None:
        """The node has this address."""
        self._addresses[node_id] = address

    async def meet(self, node_id: str, process: ProcessId) -> None:
        """From now on its end will be known, even if it comes while there is no supervisor.

        Watchers of other nodes live on meanwhile, and know what they were asked about. What cannot be kept now is kept
        with the next call.
        """
        if node_id != self._spec.node_id:
            return
        if process.name not in self._kept:
            self._kept[process.name], self._is_kept = process, False
            self._forget_ended()
        async with self._keeping:
            if self._is_kept:
                return
            known = list(self._kept.values())
            try:
                async with asyncio.timeout(_KEEP_S):
                    await asyncio.to_thread(self._keep, known)
            except (RayError, TimeoutError) as error:
                _log.warning("the next supervisor will not know of %s: %r", process.name, error)
            else:
                self._is_kept = known == list(self._kept.values())

    def _forget_ended(self) -> None:
        """The oldest, while there are too many."""
        num_over = len(self._kept) - _MAX_KEPT
        ended = [name for name, kept in self._kept.items() if has_ended(kept)] if num_over > 0 else []
        for name in ended[: max(0, num_over)]:
            del self._kept[name]

    async def wait_ended(self, node_id: str, process: ProcessId) -> None:
        """Until the process has provably ended. Raises `WorkerLostError` when its node is gone: nobody knows then."""
        if node_id == self._spec.node_id:
            await self._here.wait_ended(process, None)
            return
        try:
            async with self._used(node_id) as node:
                while not await self._has_ended(node, process):
                    pass  # still running: ask again
        except RayError as error:  # dead, or not to be placed: its node is gone, and it may run on no other
            raise WorkerLostError(f"node {node_id[:8]} is gone") from error

    async def boot_of(self, node_id: str) -> HostBoot:
        """The boot under which a node runs. Raises `WorkerLostError` when it does not say."""
        if node_id == self._spec.node_id:
            return this_boot(self._addresses[node_id])
        try:
            async with asyncio.timeout(_MEET_S):
                async with self._used(node_id) as node:
                    boot: HostBoot = await node.actor.boot.remote()
                    return boot
        except (RayError, TimeoutError) as error:
            raise WorkerLostError(f"node {node_id[:8]} cannot be asked: {error!r}") from error

    async def kill(self, node_id: str, process: ProcessId) -> None:
        """SIGKILL on its own node, within some seconds where that can be had, else as soon as its node is reached."""
        if node_id == self._spec.node_id:
            self._here.kill(process)
            return
        killing = self._kills.get(process.name)
        if killing is None:
            killing = self._kills[process.name] = asyncio.ensure_future(self._kill_there(node_id, process))
            killing.add_done_callback(lambda _: self._kills.pop(process.name))
        await asyncio.wait({killing}, timeout=_KILL_S)

    async def _kill_there(self, node_id: str, process: ProcessId) -> None:
        try:
            async with self._used(node_id) as node:
                while not await self._has_killed(node, process):
                    pass  # ask again
        except RayError as error:
            _log.warning("no watcher to kill %s on its node: %r", process.name, error)

    def adopt(self, found: list[tuple[str, Any]], kept: Sequence[ProcessId]) -> list[str]:
        """Take over an earlier supervisor's watchers, (node id and number, actor); the names of what has ended. Blocks.

        One that watches nothing any more is ended.

        Args:
            kept: what the earlier supervisor had been told to keep.
        """
        self._kept = {process.name: process for process in kept}
        ended = [process.name for process in kept if has_ended(process)]
        for name, actor in found:
            try:
                watched: dict[str, bool] = ray.get(actor.watched.remote(), timeout=_ADOPT_S)
            except RayError as error:
                _log.warning("watcher %s does not answer: %r", name, error)
                continue
            ended += [process for process, has_ended in watched.items() if has_ended]
            if all(watched.values()):
                ray.kill(actor, no_restart=True)
            else:
                self._nodes[name.partition(".")[0]] = _Node(actor)
        return ended

    async def end(self) -> None:
        """End them all; the cluster has stopped."""
        for killing in list(self._kills.values()):
            killing.cancel()
        await asyncio.gather(*self._making.values(), return_exceptions=True)
        for node_id, node in list(self._nodes.items()):
            self._give_up(node_id, node)
        await asyncio.gather(*self._ending)

    async def _has_killed(self, node: _Node, process: ProcessId) -> bool:
        try:
            await node.actor.kill.remote(process)
        except ActorUnavailableError:  # it has died, and Ray starts it again
            await asyncio.sleep(_RETRY_S)
            return False
        return True

    async def _has_ended(self, node: _Node, process: ProcessId) -> bool:
        try:
            async with asyncio.timeout(_SLICE_S + _SLACK_S):
                return bool(await node.actor.wait_ended.remote(process, _SLICE_S))
        except ActorUnavailableError:  # it has died, and Ray starts it again: the whole time is to be had anew
            await asyncio.sleep(_RETRY_S)
        except TimeoutError:
            _log.warning("the watcher of %s does not answer; starting it again", process.name)
            await asyncio.to_thread(ray.kill, node.actor, no_restart=False)
        return False

    @asynccontextmanager
    async def _used(self, node_id: str) -> AsyncIterator[_Node]:
        """Its watcher, which stays at least until the block ends, and some time after the last one.

        One that has failed is not kept: whoever comes next gets another.
        """
        node = self._nodes.get(node_id) or await self._made(node_id)
        if node.ending is not None:
            node.ending.cancel()
            node.ending = None
        node.num_users += 1
        try:
            yield node
        except RayError as error:
            if not isinstance(error, ActorUnavailableError | RayTaskError):  # by these it lives, or will again
                self._give_up(node_id, node)
            raise
        finally:
            node.num_users -= 1
            if node.num_users == 0:
                self._end_later(node_id, node)

    async def _made(self, node_id: str) -> _Node:
        """A new watcher; all who ask at the same time get the same."""
        making = self._making.get(node_id)
        if making is None:
            making = self._making[node_id] = asyncio.create_task(self._make_node(node_id))
            making.add_done_callback(lambda _: self._making.pop(node_id))
        return await asyncio.shield(making)  # one who waits no longer takes it from nobody

    async def _make_node(self, node_id: str) -> _Node:
        node = self._nodes[node_id] = _Node(await asyncio.to_thread(self._make, node_id))
        self._end_later(node_id, node)  # unless somebody still waits for it
        return node

    def _make(self, node_id: str) -> Any:
        return make_actor(
            WatcherActor,
            name=f"{WATCHER}.{node_id}.{uuid.uuid4().hex[:8]}",
            max_concurrency=_MAX_CALLS,
            max_restarts=-1,
            **pinned(node_id, self._addresses.get(node_id, "")),
        ).remote(self._spec)

    def _end_later(self, node_id: str, node: _Node) -> None:
        node.ending = asyncio.get_running_loop().call_later(_LINGER_S, self._end_idle, node_id, node)

    def _end_idle(self, node_id: str, node: _Node) -> None:
        if node.num_users == 0:
            self._give_up(node_id, node)

    def _give_up(self, node_id: str, node: _Node) -> None:
        """It is asked nothing any more."""
        if self._nodes.get(node_id) is not node:
            return
        del self._nodes[node_id]
        ending = asyncio.create_task(asyncio.to_thread(ray.kill, node.actor, no_restart=True))
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)
