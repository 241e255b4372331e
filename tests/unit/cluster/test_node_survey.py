"""The supervisor's shell on several nodes that exist only here: who is asked, and where workers go."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from tandem.cluster.supervisor import node_survey
from tandem.cluster.supervisor.nodes import Node
from tandem.core.errors import WorkerLostError
from tandem.core.identity import Role
from tandem.core.machine import HostBoot
from tests.support.scripted_processes import IMPATIENT, World, processes, supervising, until_change
from tests.support.waiting import LONG_S, until


def node(name: str, role: Role) -> Node:
    return Node(name, f"10.0.0.{name}", 6000, {role: 1})


PREFILL, FIRST, SECOND = node("p", Role.PREFILL), node("d1", Role.DECODE), node("d2", Role.DECODE)


@pytest.fixture
async def world() -> AsyncIterator[World]:
    """A prefill node, and two for one decode worker."""
    async with processes() as world:
        world.listed = [PREFILL, FIRST, SECOND]
        yield world


async def test_a_worker_goes_to_a_node_that_answers(world: World) -> None:
    world.cut_off = {"d1"}
    async with supervising(world) as supervisor:
        await until_change(supervisor, lambda: supervisor.cluster.settled)
        assert world.named("decode-0").node_id == "d2"
        assert world.knocked.index("d1") < world.knocked.index("d2")


@pytest.mark.long
async def test_the_successor_of_a_worker_that_is_cut_off_with_its_node_goes_to_another_and_waits_for_no_proof(
    world: World,
) -> None:
    async with supervising(world) as supervisor:
        await until_change(supervisor, lambda: supervisor.cluster.settled)
        first = world.named("decode-0")
        assert first.node_id == "d1"
        first.provable = False
        world.deaf, world.cut_off = True, {"d1", "p"}
        await until(lambda: supervisor.cluster.book.is_suspect("d1"), "d1 is suspect")
        world.deaf, world.cut_off = False, {"d1"}
        first.die()
        await until_change(supervisor, lambda: supervisor.cluster.settled and world.named("decode-0") is not first)
        assert world.named("decode-0").node_id == "d2"
        world.cut_off = set()
        await until(lambda: not supervisor.cluster.book.suspects, "d1 answers again")
        first.provable = True
        first.prove()


@pytest.mark.long
async def test_a_worker_that_is_stopped_on_a_node_that_answers_is_started_there_again(world: World) -> None:
    world.listed = [PREFILL, FIRST]
    async with supervising(world, policy=IMPATIENT) as supervisor:
        await until_change(supervisor, lambda: supervisor.cluster.settled)
        first = world.named("decode-0")
        world.deaf = True
        await until_change(supervisor, lambda: first.was_killed)
        world.deaf = False
        await until_change(supervisor, lambda: supervisor.cluster.settled and world.named("decode-0") is not first)
        assert world.named("decode-0").node_id == "d1"
        assert not supervisor.cluster.book.suspects


async def test_a_host_that_is_back_under_a_new_boot_proves_the_end_of_what_ran_there(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is started on it: the supervisor asks it all the same."""
    monkeypatch.setattr(node_survey, "MEET_EVERY_S", 0.2)
    boot = world.boots["d1"] = HostBoot(FIRST.address, "machine-1", "boot-1")
    async with supervising(world) as supervisor:
        await until_change(supervisor, lambda: supervisor.cluster.settled)
        first = world.named("decode-0")
        lost, first.provable = first.incarnation, False
        world.listed = [PREFILL, SECOND]
        first.gone.set_exception(WorkerLostError("its node is gone"))
        first.die()
        await until(lambda: supervisor.cluster.book.unproven == {lost: boot}, "the end is unproven")
        await until_change(supervisor, lambda: supervisor.cluster.settled)
        assert world.notes == []
        back = Node("d1-again", FIRST.address, 6001, {Role.DECODE: 1})
        world.boots["d1-again"] = HostBoot(FIRST.address, "machine-1", "boot-2")
        world.listed = [PREFILL, SECOND, back]
        await world.until_noted(lambda: world.notes.count((lost,)) == 2)
        assert supervisor.cluster.book.unproven == {}


async def test_without_a_list_of_nodes_ray_places(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its control store is away, or everything runs on one host."""
    monkeypatch.setattr(node_survey, "LIST_TIMEOUT_S", 0.1)
    world.listed = []
    async with supervising(world) as supervisor:
        await until_change(supervisor, lambda: supervisor.cluster.settled)
        assert world.named("decode-0").node_id == ""
        assert world.knocked == []


async def test_what_waits_for_a_node_starts_on_the_one_that_answers_again(world: World) -> None:
    world.listed, world.cut_off = [PREFILL, FIRST], {"d1"}
    world.autoplace = False
    async with supervising(world) as supervisor:
        await until(lambda: [w.name for w in world.workers].count("decode-0") == 1, "decode-0 is asked for")
        assert world.named("decode-0").node_id == ""
        world.autoplace, world.cut_off = True, set()
        await until_change(supervisor, lambda: supervisor.cluster.settled)
        assert world.named("decode-0").node_id == "d1"
        assert supervisor.cluster.workers["decode-0"].failures == 0


@pytest.mark.long
async def test_nodes_are_knocked_at_while_a_machine_does_not_say_which_one_it_is(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_survey, "MEET_EVERY_S", 0.1)
    asked, answer = asyncio.Event(), asyncio.Event()
    num_asked = 0

    async def meet(_node: Node) -> HostBoot:
        nonlocal num_asked
        num_asked += 1
        asked.set()
        await answer.wait()
        raise WorkerLostError("it did not say")

    monkeypatch.setattr(world, "meet", meet)
    async with supervising(world) as supervisor:
        await until_change(supervisor, lambda: supervisor.cluster.settled)
        supervisor.cluster.book.leave_unproven("decode-0.x", HostBoot(FIRST.address, "machine", "boot"))
        await asyncio.wait_for(asked.wait(), LONG_S)
        cut_off: tuple[set[str], ...] = (set(), {"p"}, set())
        for world.cut_off in cut_off:
            supervisor.cluster.book.miss("p")
            await until(lambda: supervisor.cluster.book.suspects == world.cut_off, "p is knocked at")
            await until(lambda: not supervisor.cluster.book.missed, "p is knocked at")
        assert num_asked == 1, "one that is being asked is not asked again"
        answer.set()
