"""What the supervisor does for an event does not grow with the number of workers: counted, not timed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest

from tandem.cluster.supervisor.events import (
    Adopted,
    ClusterOpened,
    EndingsTaken,
    Event,
    Exited,
    HeartbeatMissed,
    Intent,
    LoadReported,
    NodeKnocked,
    NodesListed,
    Placed,
    Placement,
    Started,
    Tick,
)
from tandem.cluster.supervisor.nodes import Node
from tandem.cluster.supervisor.slots import Policy
from tandem.cluster.supervisor.supervisor import Supervisor
from tandem.core.identity import WORKER_ROLES, Role
from tests.support.scripted_processes import World
from tests.support.work import num_instructions

NODES = tuple(Node(f"n{n}", f"10.0.0.{n}", 6000, {Role.PREFILL: 128, Role.DECODE: 128}) for n in range(4))
EVENTS = [
    "a heartbeat", "a missed heartbeat", "the news of an end is taken", "a knock", "time passes",
    "a worker ends", "its successor is placed", "its successor is ready",
]  # fmt: skip


@dataclass
class Crowd:
    """A supervisor of many workers, of which it adopts all; nobody answers for them."""

    supervisor: Supervisor

    def feed(self, event: Event) -> int:
        """How much work it is."""
        return num_instructions(lambda: self.supervisor._feed(event))

    def life(self, name: str) -> str:
        return self.supervisor.cluster.slots[name].incarnation


@asynccontextmanager
async def crowd(num_workers: int) -> AsyncIterator[Crowd]:
    world = World()
    supervisor = Supervisor(world, wanted=dict.fromkeys(Role, 0), heartbeat_s=60.0, policy=Policy())
    run = asyncio.create_task(supervisor.run())
    await supervisor.opened.wait()
    try:
        for role, num in {**dict.fromkeys(WORKER_ROLES, num_workers // 2), Role.ROUTER: 2}.items():
            for n in range(num):
                node = NODES[n % len(NODES)]
                place = Placement(node.address, n + 1, node.node_id)
                supervisor._feed(Adopted(f"{role}-{n}", f"{role}-life-{n}", f"{node.address}:{n}", place))
        wanted = {**dict.fromkeys(WORKER_ROLES, num_workers // 2), Role.ROUTER: 2}
        supervisor._feed(ClusterOpened(Intent(wanted)))
        supervisor._feed(NodesListed(NODES))
        assert supervisor.cluster.settled
        yield Crowd(supervisor)
    finally:
        run.cancel()
        await asyncio.gather(run, return_exceptions=True)
        await world.close()


async def works(num_workers: int) -> dict[str, int]:
    """Of each kind of event, how much work one is: for the second worker, when nothing is left of what came before."""
    async with crowd(num_workers) as many:
        place, found = Placement("10.0.0.1", 7, "n1"), dict[str, int]()
        for number in (num_workers // 4, num_workers // 4 + 1):
            name = f"decode-{number}"
            life = many.life(name)
            found["a heartbeat"] = many.feed(LoadReported(name, life, 3))
            found["a missed heartbeat"] = many.feed(HeartbeatMissed(name, life))
            found["the news of an end is taken"] = many.feed(EndingsTaken(name, life, ("x",)))
            found["a knock"] = many.feed(NodeKnocked("n1", answered=True))
            found["time passes"] = many.feed(Tick())
            found["a worker ends"] = many.feed(Exited(name, life, None))
            found["its successor is placed"] = many.feed(Placed(name, many.life(name), place))
            found["its successor is ready"] = many.feed(Started(name, many.life(name), "10.0.0.1:9", place))
            assert many.supervisor.cluster.settled
        return found


async def test_the_work_of_an_event_does_not_grow_with_the_number_of_workers(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    few, many = await works(64), await works(1024)
    assert few.keys() == set(EVENTS)
    grown = {event: (few[event], many[event]) for event in EVENTS if many[event] > 1.25 * few[event]}
    assert not grown
