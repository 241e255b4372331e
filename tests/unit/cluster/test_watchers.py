"""When the supervisor keeps a node's watcher, and when it ends it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from tandem.cluster import watchers
from tandem.cluster.node_watcher import ProcessId
from tandem.cluster.spec import ClusterSpec
from tandem.cluster.watchers import NodeWatchers

LINGER_S = 0.05
PROCESS = ProcessId("decode-0.x", 1, 1)


@dataclass
class Call:
    """An actor's method, as Ray shows it."""

    run: Callable[..., Awaitable[Any]]

    def remote(self, *arguments: Any) -> Awaitable[Any]:
        return self.run(*arguments)


@dataclass
class FakeActor:
    """A watcher of one process, which lives until it is killed."""

    ended: asyncio.Event = field(default_factory=asyncio.Event)
    gone: asyncio.Event = field(default_factory=asyncio.Event)  # the watcher itself

    def __post_init__(self) -> None:
        self.kill, self.wait_ended = Call(self._kill), Call(self._wait_ended)

    async def _kill(self, process: ProcessId) -> None:
        self.ended.set()

    async def _wait_ended(self, process: ProcessId, timeout_s: float) -> bool:
        await self.ended.wait()
        return True


@pytest.fixture
def actors(monkeypatch: pytest.MonkeyPatch) -> list[FakeActor]:
    made: list[FakeActor] = []

    def make(_self: NodeWatchers, _node_id: str) -> FakeActor:
        made.append(FakeActor())
        return made[-1]

    monkeypatch.setattr(NodeWatchers, "_make", make)
    monkeypatch.setattr("tandem.cluster.watchers.ray.kill", lambda actor, no_restart: actor.gone.set())
    monkeypatch.setattr(watchers, "_LINGER_S", LINGER_S)
    return made


@pytest.mark.parametrize("crashed", [True, False])
async def test_a_watcher_ends_some_time_after_the_last_process_of_its_node(
    actors: list[FakeActor], crashed: bool, spec: ClusterSpec
) -> None:
    """A worker that has crashed is killed once more, to be sure: that use is the last."""
    nodes = NodeWatchers(spec)
    proof = asyncio.create_task(nodes.wait_ended("node", PROCESS))
    await asyncio.sleep(0)
    (actor,) = actors
    if crashed:
        actor.ended.set()
        await proof
    await nodes.kill("node", PROCESS)
    await proof
    assert not actor.gone.is_set()
    await asyncio.wait_for(actor.gone.wait(), 20 * LINGER_S)


async def test_a_watcher_that_is_used_again_in_time_stays(actors: list[FakeActor], spec: ClusterSpec) -> None:
    nodes = NodeWatchers(spec)
    await nodes.kill("node", PROCESS)
    (actor,) = actors
    actor.ended.clear()
    proof = asyncio.create_task(nodes.wait_ended("node", PROCESS))
    await asyncio.sleep(3 * LINGER_S)
    assert not actor.gone.is_set()
    actor.ended.set()
    await proof
    await asyncio.wait_for(actor.gone.wait(), 20 * LINGER_S)
    assert len(actors) == 1
