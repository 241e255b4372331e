"""When the supervisor keeps a node's watcher, when it ends it, and how it watches its own node."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, cast

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayError

from tandem.cluster.ray import watchers
from tandem.cluster.ray.launcher import as_kept, kept_of
from tandem.cluster.ray.watchers import NodeWatchers
from tandem.cluster.spec import ClusterSpec
from tandem.core.errors import WorkerLostError
from tandem.core.machine import HostBoot
from tandem.core.pidfd import ProcessId, started_at
from tests.support.waiting import until

LINGER_S = 0.05
PROCESS = ProcessId("decode-0.x", 1, 1)
HERE = "head"


def keep_nothing(_processes: Sequence[ProcessId]) -> None:
    """What is watched by an actor needs no keeping."""
    pytest.fail("nothing runs on the supervisor's node")


@dataclass
class Call:
    """An actor's method, as Ray shows it."""

    run: Callable[..., Awaitable[Any]]

    def remote(self, *arguments: Any) -> Awaitable[Any]:
        return self.run(*arguments)


@dataclass
class FakeActor:
    """A watcher of one process, which lives until it is killed."""

    BOOT: ClassVar[HostBoot] = HostBoot("10.0.0.1", "machine", "boot")

    ended: asyncio.Event = field(default_factory=asyncio.Event)
    gone: asyncio.Event = field(default_factory=asyncio.Event)  # the watcher itself

    def __post_init__(self) -> None:
        self.kill, self.wait_ended = Call(self._kill), Call(self._wait_ended)
        self.boot = Call(lambda: self._boot())

    async def _kill(self, process: ProcessId) -> None:
        self.ended.set()

    async def _boot(self) -> HostBoot:
        return self.BOOT

    async def _wait_ended(self, process: ProcessId, timeout_s: float) -> bool:
        await self.ended.wait()
        return True


@pytest.fixture
async def actors(monkeypatch: pytest.MonkeyPatch) -> list[FakeActor]:
    made: list[FakeActor] = []

    def make(_self: NodeWatchers, _node_id: str) -> FakeActor:
        made.append(FakeActor())
        return made[-1]

    monkeypatch.setattr(NodeWatchers, "_make", make)
    loop = asyncio.get_running_loop()
    monkeypatch.setattr(watchers.ray, "kill", lambda actor, no_restart: loop.call_soon_threadsafe(actor.gone.set))
    monkeypatch.setattr(watchers, "_LINGER_S", LINGER_S)
    return made


@pytest.mark.parametrize("crashed", [True, False])
async def test_a_watcher_ends_some_time_after_the_last_process_of_its_node(
    actors: list[FakeActor], crashed: bool, spec: ClusterSpec
) -> None:
    """A worker that has crashed is killed once more, to be sure: that use is the last."""
    nodes = NodeWatchers(spec, keep_nothing)
    proof = asyncio.create_task(nodes.wait_ended("node", PROCESS))
    await until(lambda: actors, "a watcher is made")
    (actor,) = actors
    if crashed:
        actor.ended.set()
        await proof
    await nodes.kill("node", PROCESS)
    await proof
    assert not actor.gone.is_set()
    await asyncio.wait_for(actor.gone.wait(), 20 * LINGER_S)


@pytest.mark.long
async def test_a_watcher_that_is_used_again_in_time_stays(actors: list[FakeActor], spec: ClusterSpec) -> None:
    nodes = NodeWatchers(spec, keep_nothing)
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


# --- the supervisor's own node ---------------------------------------------------------------------------------------


class Keeper:
    """What is there for a later supervisor."""

    def __init__(self) -> None:
        self.kept: list[ProcessId] = []
        self.num_writes = 0

    def keep(self, processes: Sequence[ProcessId]) -> None:
        self.kept, self.num_writes = list(processes), self.num_writes + 1


@pytest.fixture
def at_head(spec: ClusterSpec) -> ClusterSpec:
    return dataclasses.replace(spec, node_id=HERE)


@pytest.fixture
def child() -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, text=True)
    yield process
    process.kill()
    process.communicate()


def process_of(child: subprocess.Popen[str], name: str = "prefill-0.a") -> ProcessId:
    started = started_at(child.pid)
    assert started is not None
    return ProcessId(name, child.pid, started)


@pytest.mark.processes
async def test_its_own_node_the_supervisor_watches_without_an_actor(
    actors: list[FakeActor], at_head: ClusterSpec, child: subprocess.Popen[str]
) -> None:
    nodes, process = NodeWatchers(at_head, Keeper().keep), process_of(child)
    proof = asyncio.create_task(nodes.wait_ended(HERE, process))
    await asyncio.wait({proof}, timeout=0.05)
    assert not proof.done()
    await nodes.kill(HERE, process)
    await asyncio.wait_for(proof, 60)
    assert child.wait() == -9
    assert actors == []


@pytest.mark.processes
async def test_what_ended_here_while_no_supervisor_ran_is_known_to_the_next(
    at_head: ClusterSpec, child: subprocess.Popen[str]
) -> None:
    keeper, process = Keeper(), process_of(child)
    gone = dataclasses.replace(process, name="decode-0.b", started=process.started - 1)
    before = NodeWatchers(at_head, keeper.keep)
    for known in (process, gone, process, gone):
        await before.meet(HERE, known)
    await before.meet("another", ProcessId("decode-1.c", 1, 1))
    assert keeper.kept == [process, gone]
    assert keeper.num_writes == 2  # one for each that is new
    after = NodeWatchers(at_head, keeper.keep)
    assert after.adopt([], keeper.kept) == [gone.name]
    await after.meet(HERE, process)
    assert keeper.num_writes == 2  # it had been kept already


def test_what_is_kept_is_judged_on_its_own_node_only() -> None:
    """A number that is nobody's here proves nothing of a process of another host."""
    process = ProcessId("prefill-0.a", 7, 8)
    kept = json.loads(json.dumps(as_kept("a node", [process])))
    assert kept_of("a node", kept) == [process]
    assert kept_of("another", kept) == kept_of("a node", None) == []


@pytest.mark.processes
async def test_what_could_not_be_kept_is_with_the_next_call(at_head: ClusterSpec, child: subprocess.Popen[str]) -> None:
    keeper, process = Keeper(), process_of(child)
    broken = [1]

    def keep(processes: Sequence[ProcessId]) -> None:
        if broken:
            broken.pop()
            raise RayError("the store is away")
        keeper.keep(processes)

    nodes = NodeWatchers(at_head, keep)
    await nodes.meet(HERE, process)
    assert keeper.kept == []
    await nodes.meet(HERE, process)
    assert keeper.kept == [process]


@pytest.mark.processes
async def test_what_is_kept_last_is_the_newest(at_head: ClusterSpec, child: subprocess.Popen[str]) -> None:
    """The first write takes longer than the second would."""
    kept: list[int] = []

    def keep(processes: Sequence[ProcessId]) -> None:
        if not kept and len(processes) == 1:
            time.sleep(0.1)
        kept.append(len(processes))

    nodes, process = NodeWatchers(at_head, keep), process_of(child)
    await asyncio.gather(*(nodes.meet(HERE, dataclasses.replace(process, name=f"decode-{n}.a")) for n in range(2)))
    assert kept[-1] == 2


@pytest.mark.processes
async def test_of_what_is_kept_the_oldest_that_have_ended_go_first(
    at_head: ClusterSpec, child: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchers, "_MAX_KEPT", 3)
    keeper, alive = Keeper(), process_of(child)
    nodes = NodeWatchers(at_head, keeper.keep)
    await nodes.meet(HERE, alive)
    for n in range(10):
        await nodes.meet(HERE, ProcessId(f"decode-0.{n}", alive.pid, alive.started - 1))
    assert [process.name for process in keeper.kept] == [alive.name, "decode-0.8", "decode-0.9"]
    for n in range(4):  # all of them run: none can be forgotten
        await nodes.meet(HERE, dataclasses.replace(alive, name=f"prefill-1.{n}"))
    assert {process.name for process in keeper.kept} == {alive.name, *(f"prefill-1.{n}" for n in range(4))}


async def test_a_kill_that_cannot_reach_its_node_goes_on_until_it_can(
    actors: list[FakeActor], spec: ClusterSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node is cut off. When that is over, a process that was given up must not live on beside its successor."""
    monkeypatch.setattr(watchers, "_KILL_S", 0.05)
    is_healed = asyncio.Event()

    async def kill_when_healed(actor: FakeActor, _process: ProcessId) -> None:
        await is_healed.wait()
        actor.ended.set()

    monkeypatch.setattr(FakeActor, "_kill", kill_when_healed)
    nodes = NodeWatchers(spec, keep_nothing)
    for _ in range(2):  # asked for twice, sent once
        await nodes.kill("node", PROCESS)
    (actor,) = actors
    assert not actor.ended.is_set()
    is_healed.set()
    await asyncio.wait_for(actor.ended.wait(), 60)


async def test_a_node_is_asked_which_boot_it_runs(actors: list[FakeActor], spec: ClusterSpec) -> None:
    nodes = NodeWatchers(spec, keep_nothing)
    assert await nodes.boot_of("node") == FakeActor.BOOT
    (actor,) = actors
    await asyncio.wait_for(actor.gone.wait(), 20 * LINGER_S)  # nothing of ours keeps the node


def made_late(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Until this is set, Ray is at making watchers."""
    may_go_on, make = threading.Event(), NodeWatchers._make

    def make_late(nodes: NodeWatchers, node_id: str) -> FakeActor:
        assert may_go_on.wait(5)
        return cast(FakeActor, make(nodes, node_id))

    monkeypatch.setattr(NodeWatchers, "_make", make_late)
    return may_go_on


async def test_while_ray_makes_a_watcher_everything_else_goes_on_and_all_who_ask_get_the_same(
    actors: list[FakeActor], spec: ClusterSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray's control store takes its time, or has gone."""
    may_go_on = made_late(monkeypatch)
    nodes = NodeWatchers(spec, keep_nothing)
    asked = [asyncio.create_task(nodes.boot_of("node")) for _ in range(3)]
    impatient = asyncio.create_task(nodes.boot_of("node"))
    await asyncio.wait(asked, timeout=0.05)
    assert not any(task.done() for task in asked)
    impatient.cancel()
    may_go_on.set()
    assert await asyncio.wait_for(asyncio.gather(*asked), 60) == [FakeActor.BOOT] * 3
    assert len(actors) == 1


async def test_while_ray_ends_a_watcher_everything_else_goes_on(
    actors: list[FakeActor], spec: ClusterSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_go_on, threads = threading.Event(), list[threading.Thread]()

    def end_late(_actor: FakeActor, no_restart: bool) -> None:
        threads.append(threading.current_thread())
        assert may_go_on.wait(5)

    monkeypatch.setattr(watchers.ray, "kill", end_late)
    nodes = NodeWatchers(spec, keep_nothing)
    assert await nodes.boot_of("node") == FakeActor.BOOT
    await until(lambda: threads, "the watcher is ended")
    assert threads != [threading.main_thread()]
    may_go_on.set()
    await nodes.end()


async def test_a_watcher_that_nobody_waits_for_any_more_ends(
    actors: list[FakeActor], spec: ClusterSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_go_on = made_late(monkeypatch)
    monkeypatch.setattr(watchers, "_MEET_S", 0.02)
    nodes = NodeWatchers(spec, keep_nothing)
    with pytest.raises(WorkerLostError):
        await nodes.boot_of("node")
    may_go_on.set()
    await until(lambda: actors, "the watcher is made")
    await asyncio.wait_for(actors[0].gone.wait(), 20 * LINGER_S)


@pytest.mark.parametrize("call", ["boot", "kill"])
async def test_a_watcher_that_has_failed_is_asked_nothing_more(
    actors: list[FakeActor], spec: ClusterSpec, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(_actor: FakeActor, *_: object) -> None:
        raise ActorDiedError

    ask: dict[str, Callable[[], Awaitable[Any]]] = {
        "boot": lambda: nodes.boot_of("node"),
        "kill": lambda: nodes.kill("node", PROCESS),
    }
    nodes = NodeWatchers(spec, keep_nothing)
    with monkeypatch.context() as broken:
        broken.setattr(FakeActor, f"_{call}", fail)
        if call == "boot":
            with pytest.raises(WorkerLostError):
                await ask[call]()
        else:
            await ask[call]()
    await ask[call]()
    first, second = actors
    await asyncio.wait_for(first.gone.wait(), 60)
    assert second.ended.is_set() == (call == "kill")


async def test_a_watcher_that_starts_again_is_not_taken_from_those_who_wait_for_it(
    actors: list[FakeActor], spec: ClusterSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def restart(_actor: FakeActor) -> None:
        raise ActorUnavailableError("it is started again", None)

    nodes = NodeWatchers(spec, keep_nothing)
    proof = asyncio.create_task(nodes.wait_ended("node", PROCESS))
    await until(lambda: actors, "a watcher is made")
    monkeypatch.setattr(FakeActor, "_boot", restart)
    with pytest.raises(WorkerLostError):
        await nodes.boot_of("node")
    (actor,) = actors
    assert not actor.gone.is_set()
    actor.ended.set()
    await asyncio.wait_for(proof, 60)
