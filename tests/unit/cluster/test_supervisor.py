"""The supervisor's shell against processes that exist only here."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator

import pytest

from tandem.cluster.supervisor.events import INSTALLED, Build, Intent, LoadReported, ProcessEnded
from tandem.cluster.supervisor.handles import Found, Memory, ProcessState
from tandem.cluster.supervisor.router_monitor import ERRORS_INTERVAL_S
from tandem.cluster.supervisor.slots import Phase
from tandem.cluster.supervisor.supervisor import Supervisor
from tandem.core.config import MAX_POOL
from tandem.core.errors import ConfigError, InternalError, ModelLoadError, WorkerLostError
from tandem.core.identity import Role
from tandem.rpc.v1 import common_pb2
from tandem.rpc.v1.control_pb2 import SuspectedWriter
from tests.support.scripted_processes import (
    CACHE_SECRET,
    IMPATIENT,
    POLICY,
    ScriptedRouterProcess,
    ScriptedWorkerProcess,
    World,
    patient_shutdown,
    processes,
    running,
    supervising,
    until_change,
)
from tests.support.waiting import LONG_S, until


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with processes() as world:
        yield world


async def test_brings_up_the_pools_and_tells_the_router(world: World) -> None:
    async with supervising(world, 1, 2) as supervisor:
        await until_change(supervisor, lambda: supervisor.cluster.settled)
        assert sorted(worker.name for worker in world.workers) == ["decode-0", "decode-1", "prefill-0"]
        assert world.remembered == Intent({Role.PREFILL: 1, Role.DECODE: 2, Role.ROUTER: 1})
        await asyncio.wait_for(world.told.wait(), LONG_S)
    assert len(world.memberships[-1].members) == 3
    assert {membership.cache_secret for membership in world.memberships} == {CACHE_SECRET}
    versions = [membership.version for membership in world.memberships]
    assert versions == sorted(versions)
    assert versions[0] > 1 << 32
    assert all(process.ended.result() is None for process in (*world.workers, *world.routers))  # stopped in order


async def test_one_of_two_routers_dies_and_the_other_goes_on(world: World) -> None:
    async with supervising(world, routers=2) as supervisor:
        await until_change(supervisor, lambda: supervisor.cluster.settled)
        first, second = sorted(world.routers, key=lambda router: router.name)
        assert (first.name, second.name) == ("router-0", "router-1")
        first.die()
        await until_change(supervisor, lambda: len(world.routers) == 3 and supervisor.cluster.settled)
        assert world.routers[-1].name == "router-0"
        assert not second.ended.done()
    latest = [router.memberships[-1] for router in (second, world.routers[-1])]
    assert [membership.router_number for membership in latest] == [1, 0], "each has its own share"
    assert [[other.name for other in each.other_routers] for each in latest] == [["router-0"], ["router-1"]]
    for membership in latest:
        membership.ClearField("router_number")
        membership.ClearField("other_routers")
    assert latest[0] == latest[1]
    assert latest[0].num_routers == 2
    assert all(router.ended.result() is None for router in (second, world.routers[-1]))  # stopped in order


async def test_a_shutdown_lets_requests_end_at_every_router(world: World) -> None:
    async with running(world, routers=2) as (supervisor, run):
        world.requests_end.clear()
        await until_change(supervisor, lambda: supervisor.cluster.settled)
        asking = asyncio.create_task(supervisor.shut_down(grace_s=60))
        assert len(world.routers) == 2
        for router in world.routers:
            await asyncio.wait_for(router.asked_to_drain.wait(), LONG_S)
        world.requests_end.set()
        await asyncio.wait_for(asyncio.gather(asking, run), LONG_S)


async def test_a_removed_router_goes_only_when_its_last_connection_has_ended(world: World) -> None:
    async with supervising(world, routers=2) as supervisor:
        await until_change(supervisor, lambda: supervisor.cluster.settled)
        await supervisor.scale({Role.ROUTER: 1})
        leaving = next(router for router in world.routers if router.name == "router-1")
        await asyncio.wait_for(leaving.asked_to_leave.wait(), LONG_S)
        assert not leaving.ended.done()
        assert not leaving.asked_to_drain.is_set(), "it refuses nobody"
        leaving.left.set()
        await until_change(supervisor, lambda: supervisor.cluster.settled)
        assert leaving.ended.result() is None  # stopped in order
        assert world.remembered.wanted[Role.ROUTER] == 1


async def test_a_drained_router_is_replaced_by_one_on_its_own_node(world: World) -> None:
    async with supervising(world, routers=2) as supervisor:
        await until_change(supervisor, lambda: supervisor.cluster.settled)
        await supervisor.drain("router-0", replace_first=True, timeout_s=60)
        await until_change(supervisor, lambda: "router-2" in world.started_beside)
        assert world.started_beside["router-2"] == ["router-1"], "the one that leaves is not counted"
        old = next(router for router in world.routers if router.name == "router-0")
        await asyncio.wait_for(old.asked_to_leave.wait(), LONG_S)
        old.left.set()
        await until_change(supervisor, lambda: supervisor.cluster.settled)
        assert set(supervisor.cluster.routers) == {"router-1", "router-2"}


async def test_while_what_is_intended_cannot_be_kept_tasks_do_not_pile_up(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A control store that is lost keeps whoever writes to it waiting for minutes."""
    is_back, remember = threading.Event(), world.remember

    def wait_and_remember(intent: Intent) -> None:
        assert is_back.wait(LONG_S)
        remember(intent)

    async with supervising(world) as supervisor:
        await until_change(supervisor, lambda: supervisor.cluster.settled)
        monkeypatch.setattr(world, "remember", wait_and_remember)
        world.named("decode-0").die()
        await until_change(supervisor, lambda: len(world.workers) == 3 and supervisor.cluster.settled)
        before = len(asyncio.all_tasks())
        for _ in range(100):
            supervisor._feed(LoadReported("prefill-0", world.named("prefill-0").incarnation, 0))
        assert len(asyncio.all_tasks()) == before
        is_back.set()
        await until(lambda: world.remembered == supervisor.cluster.intent, "what is intended")


async def test_a_dead_worker_is_replaced(world: World) -> None:
    async with supervising(world) as supervisor:
        await until_change(supervisor, lambda: supervisor.cluster.settled)
        first = world.named("decode-0")
        first.die()
        await until_change(supervisor, lambda: len(world.workers) == 3 and supervisor.cluster.settled)
        assert world.named("decode-0").incarnation != first.incarnation


async def test_a_failed_start_is_killed_and_its_error_kept(world: World) -> None:
    world.autoload = False
    async with supervising(world) as supervisor:
        await until_change(supervisor, lambda: len(world.workers) == 2)
        first = world.named("decode-0")
        first.loaded.set_exception(ModelLoadError("no weights"))
        await until_change(supervisor, lambda: len(world.workers) == 3)
        assert first.was_killed
        error = supervisor.cluster.workers["decode-0"].last_error
        assert error is not None
        assert (error.code, error.message) == ("model_load", "no weights")


@pytest.mark.long
async def test_a_worker_that_cannot_even_be_asked_for_is_tried_again_and_the_others_go_on(world: World) -> None:
    async with supervising(world) as supervisor:
        await until_change(supervisor, lambda: supervisor.cluster.settled)
        world.cannot_start = InternalError("the wheel of 1.2 is not in Ray's control store")
        world.named("decode-0").die()
        slot = supervisor.cluster.workers["decode-0"]
        await until_change(supervisor, lambda: slot.failures >= 3)
        assert slot.last_error is not None
        assert slot.last_error.message == "the wheel of 1.2 is not in Ray's control store"
        assert not world.named("prefill-0").ended.done()
        world.cannot_start = None
        await until_change(supervisor, lambda: supervisor.cluster.settled)


@pytest.mark.long
async def test_a_worker_that_answers_no_heartbeat_is_killed(world: World) -> None:
    async with supervising(world, policy=IMPATIENT) as supervisor:
        await until_change(supervisor, lambda: supervisor.cluster.settled)
        world.deaf = True
        first = world.named("prefill-0")
        await until_change(supervisor, lambda: first.was_killed)
        world.deaf = False
        await until_change(supervisor, lambda: world.named("prefill-0") is not first)


async def test_a_removed_worker_goes_only_when_it_has_drained(world: World) -> None:
    async with supervising(world, 1, 2) as supervisor:
        await until_change(supervisor, lambda: supervisor.cluster.settled)
        await supervisor.scale({Role.DECODE: 1})
        leaving = next(slot for slot in supervisor.cluster.workers.values() if slot.leaving)
        worker = world.named(leaving.name)
        await until_change(supervisor, lambda: leaving.phase is Phase.DRAINING)
        assert not worker.ended.done()
        worker.drained.set()
        await until_change(supervisor, lambda: supervisor.cluster.settled)
        assert worker.ended.done()
        assert world.remembered.wanted[Role.DECODE] == 1


@pytest.mark.long
async def test_drain_and_stop_outlive_their_connection(world: World) -> None:
    async with supervising(world, 1, 2) as supervisor:
        await until_change(supervisor, lambda: supervisor.cluster.settled)
        for worker in world.workers:
            worker.breaks_off = True
            worker.drained.set()
        await supervisor.scale({Role.DECODE: 1})
        await until_change(supervisor, lambda: supervisor.cluster.settled)
        (leaving,) = (worker for worker in world.workers if worker.ended.done())
        assert leaving.num_drains == leaving.num_stops == 2
        assert leaving.ended.result() is None  # stopped in order, not killed


async def test_a_worker_that_cannot_drain_is_killed(world: World) -> None:
    async with supervising(world, 1, 2) as supervisor:
        await until_change(supervisor, lambda: supervisor.cluster.settled)
        for worker in world.workers:
            worker.refuses_drain = True
        await supervisor.scale({Role.DECODE: 1})
        await until_change(supervisor, lambda: supervisor.cluster.settled)
        (leaving,) = (worker for worker in world.workers if worker.ended.done())
        assert leaving.was_killed
        assert leaving.num_drains == 1


@pytest.mark.long
async def test_a_worker_that_ignores_stop_is_killed(world: World) -> None:
    async with supervising(world, 2, 1) as supervisor:
        await until_change(supervisor, lambda: supervisor.cluster.settled)
        for worker in world.workers:
            worker.ignores_stop = worker.name == "prefill-1"
            worker.drained.set()
        await supervisor.scale({Role.PREFILL: 1})
        await until_change(supervisor, lambda: supervisor.cluster.settled)
        assert world.named("prefill-1").was_killed


async def test_a_restarted_router_gets_the_membership_again(world: World) -> None:
    async with supervising(world) as supervisor:
        await until_change(supervisor, lambda: supervisor.cluster.settled)
        world.told.clear()
        world.routers[0].die()
        await until_change(supervisor, lambda: len(world.routers) == 2 and supervisor.cluster.settled)
        await asyncio.wait_for(world.told.wait(), LONG_S)
        assert len(world.memberships[-1].members) == 2


@pytest.mark.parametrize(
    ("role", "size", "says"),
    [
        (Role.DECODE, 0, "--decode is 0, must be at least 1"),
        (Role.ROUTER, 0, "--routers is 0, must be at least 1"),
        (Role.PREFILL, MAX_POOL + 1, "--prefill is 1025, must be at most 1024"),
    ],
)
async def test_a_size_that_cannot_be_is_refused(world: World, role: Role, size: int, says: str) -> None:
    async with supervising(world) as supervisor:
        with pytest.raises(ConfigError, match=says):
            await supervisor.scale({role: size})


async def test_a_cluster_may_have_no_prefill_workers(world: World) -> None:
    async with supervising(world) as supervisor:
        await until_change(supervisor, lambda: supervisor.cluster.settled)
        for worker in world.workers:
            worker.drained.set()
        await supervisor.scale({Role.PREFILL: 0})
        await until_change(supervisor, lambda: supervisor.cluster.settled)
        assert {slot.role for slot in supervisor.cluster.workers.values()} == {Role.DECODE}
        assert world.remembered is not None
        assert world.remembered.colocated, "its successor must know"


async def test_what_does_not_fit_is_refused_and_changes_nothing(world: World) -> None:
    def full(added: dict[Role, int]) -> None:
        raise ConfigError(f"no room for {added[Role.DECODE]} more")

    async with supervising(world) as supervisor:
        await until_change(supervisor, lambda: supervisor.cluster.settled)
        supervisor._check_room = full
        with pytest.raises(ConfigError, match="no room for 8 more"):
            await supervisor.scale({Role.DECODE: 9})
        assert supervisor.cluster.wanted[Role.DECODE] == 1
        assert world.remembered.wanted[Role.DECODE] == 1


@pytest.mark.long
async def test_watchers_hear_of_errors_of_requests_once_a_second_at_most(world: World) -> None:
    async with supervising(world) as supervisor:
        await until_change(supervisor, lambda: supervisor.cluster.settled)
        router = supervisor.routers["router-0"]
        await until_change(supervisor, lambda: router.errors is not None)
        heard: list[tuple[float, int]] = []
        async with asyncio.timeout(10):
            async for _ in supervisor.changes():
                assert router.errors is not None
                told = sum(kind.count for kind in router.errors.counts)
                if told != (heard[-1][1] if heard else 0):
                    heard.append((supervisor.now, told))
                if told == 2:
                    break
                kind = common_pb2.ErrorCount(code="overloaded", http_status=429, count=told + 1)
                world.errors = common_pb2.RequestErrors(counts=[kind])
        (first_at, _), (second_at, _) = heard
        assert second_at - first_at >= ERRORS_INTERVAL_S


@pytest.mark.long
async def test_a_writer_that_the_router_suspects_is_killed_once(world: World) -> None:
    async with supervising(world) as supervisor:
        await until_change(supervisor, lambda: supervisor.cluster.settled)
        writer = world.named("prefill-0")
        world.suspected = [SuspectedWriter(worker_id="prefill-0", incarnation=writer.incarnation)]
        await until_change(supervisor, lambda: world.named("prefill-0") is not writer)
        assert writer.was_killed
        await until_change(supervisor, lambda: supervisor.cluster.settled)
        world.heartbeats.clear()
        for _ in range(2):  # the router goes on naming it
            await asyncio.wait_for(world.heartbeats.wait(), LONG_S)
            world.heartbeats.clear()
        assert supervisor.cluster.settled
        assert not world.named("prefill-0").was_killed
        assert len(world.workers) == 3


async def test_a_writer_that_is_suspected_before_it_is_adopted_is_killed_then(world: World) -> None:
    """The supervisor was started again, and the router has told its predecessor."""
    writer = await world.serve(ScriptedWorkerProcess(name="prefill-0", incarnation="old"))
    router = await world.serve(ScriptedRouterProcess(name="router-0", incarnation="r"))
    world.workers.append(writer)
    world.suspected = [SuspectedWriter(worker_id="prefill-0", incarnation="old")]
    world.found = Found([writer, router], [])
    async with supervising(world) as supervisor:
        await asyncio.wait_for(world.heartbeats.wait(), LONG_S)
        assert not writer.was_killed  # it does not listen yet, and is not blamed for that
        writer.loaded.set_result(None)
        await until_change(supervisor, lambda: world.named("prefill-0") is not writer)
        assert writer.was_killed


async def test_routers_that_a_later_supervisor_adopts_hear_of_each_other_from_the_first_word_on(world: World) -> None:
    """Else the one that answers first would take all that is shared for its own."""
    first, second = [
        await world.serve(ScriptedRouterProcess(name=f"router-{n}", incarnation=f"old-{n}", started=True))
        for n in range(2)
    ]
    answer = second.state

    async def late() -> ProcessState:
        await world.heartbeats.wait()
        return await answer()

    second.state = late  # type: ignore[method-assign]
    world.found = Found([first, second], [])
    world.memory = Memory(7, Intent({Role.PREFILL: 1, Role.DECODE: 1, Role.ROUTER: 2}))
    async with supervising(world, routers=2) as supervisor:
        await until_change(supervisor, lambda: supervisor.cluster.settled)
        assert supervisor.cluster.routers["router-0"].url == first.url
    told = first.memberships + second.memberships
    assert {membership.num_routers for membership in told} == {2}
    assert {len(membership.other_routers) for membership in told} == {1}


async def test_a_later_supervisor_adopts_what_lives_and_forgets_what_died(world: World) -> None:
    alive, dead = [
        await world.serve(ScriptedWorkerProcess(name=f"prefill-{n}", incarnation=f"old-{n}", started=True))
        for n in range(2)
    ]
    alive.loaded.set_result(None)

    async def gone() -> ProcessState:
        raise WorkerLostError("gone")

    dead.state = gone  # type: ignore[method-assign]
    world.found = Found([alive, dead], [])
    world.memory = Memory(7, Intent({Role.PREFILL: 1, Role.DECODE: 2, Role.ROUTER: 1}))
    async with supervising(world, 5, 5) as supervisor:
        await until_change(supervisor, lambda: supervisor.cluster.settled)
        assert sorted(worker.name for worker in world.workers) == ["decode-0", "decode-1"]
        assert supervisor.cluster.workers["prefill-0"].incarnation == "old-0"
        assert supervisor.cluster.version > 7 << 32
        assert dead.was_killed  # Ray may be wrong: it must not live on beside its replacement


async def test_a_supervisor_that_is_cancelled_leaves_its_workers_alone(world: World) -> None:
    async with running(world) as (supervisor, _):
        await until_change(supervisor, lambda: supervisor.cluster.settled)
    assert not any(worker.was_killed for worker in world.workers)


@pytest.mark.long
async def test_a_worker_whose_end_is_proved_is_replaced_though_ray_says_nothing(world: World) -> None:
    """Without its control store Ray does not tell of deaths."""
    async with supervising(world) as supervisor:
        await until_change(supervisor, lambda: supervisor.cluster.settled)
        first = world.named("decode-0")
        first.prove()
        await until_change(supervisor, lambda: world.named("decode-0") is not first and supervisor.cluster.settled)


async def test_a_shutdown_does_not_wait_for_a_process_that_ray_never_started(world: World) -> None:
    async with supervising(world) as supervisor:
        await until_change(supervisor, lambda: supervisor.cluster.settled)
        world.takes_orders.clear()
        world.named("decode-0").die()
        await until_change(supervisor, lambda: supervisor.cluster.workers["decode-0"].phase is Phase.STARTING)
        async with asyncio.timeout(LONG_S):
            await supervisor.shut_down(grace_s=0)
        world.takes_orders.set()


@pytest.mark.long
async def test_all_others_are_told_of_a_proven_end_until_they_take_it(world: World) -> None:
    async with supervising(world, 1, 2) as supervisor:
        await until_change(supervisor, lambda: supervisor.cluster.settled)
        world.deaf_to_notes = True
        ended = world.named("prefill-0").incarnation
        world.named("prefill-0").die()
        await until_change(supervisor, lambda: world.named("prefill-0").incarnation != ended)
        await world.until_noted(lambda: len(world.notes) >= 4)  # two workers, twice each: a heartbeat repeats it
        assert set(world.notes) == {(ended,)}
        world.deaf_to_notes = False
        await world.until_noted(lambda: world.num_taken == 2)
        await asyncio.sleep(0.3)  # three heartbeats
        assert world.num_taken == 2


async def test_nobody_is_told_of_an_end_that_is_not_proved(world: World) -> None:
    async with supervising(world) as supervisor:
        await until_change(supervisor, lambda: supervisor.cluster.settled)
        first = world.named("prefill-0")
        first.provable = False
        first.gone.set_exception(WorkerLostError("its node is gone"))
        first.die()
        await until_change(supervisor, lambda: world.named("prefill-0") is not first and supervisor.cluster.settled)
        proved = world.named("decode-0").incarnation
        world.named("decode-0").die()
        await world.until_noted(lambda: bool(world.notes))
        assert world.notes == [(proved,)]


@pytest.mark.long
async def test_a_silent_router_is_killed_and_started_again(world: World) -> None:
    async with supervising(world, policy=IMPATIENT) as supervisor:
        await until_change(supervisor, lambda: supervisor.cluster.settled)
        world.router_deaf = True
        await until_change(supervisor, lambda: world.routers[0].was_killed)
        world.router_deaf = False
        world.told.clear()
        await until_change(supervisor, lambda: len(world.routers) == 2 and supervisor.cluster.settled)
        await asyncio.wait_for(world.told.wait(), LONG_S)


@pytest.mark.long
async def test_processes_that_answer_are_left_alone(world: World) -> None:
    async with supervising(world, policy=IMPATIENT) as supervisor:
        await until_change(supervisor, lambda: supervisor.cluster.settled)
        await asyncio.sleep(1.5 * max(IMPATIENT.silence_s, IMPATIENT.router_silence_s))
        assert not any(process.was_killed for process in (*world.workers, *world.routers))


async def test_a_drained_worker_is_replaced_by_one_that_was_ready_before(world: World) -> None:
    async with supervising(world) as supervisor:
        await until_change(supervisor, lambda: supervisor.cluster.settled)
        world.autoload = False
        old = world.named("decode-0")
        await supervisor.drain("decode-0", replace_first=True, timeout_s=60)
        assert world.remembered.drains["decode-0"].successor == "decode-1"
        await until_change(supervisor, lambda: len(world.workers) == 3)
        assert not old.draining
        world.named("decode-1").loaded.set_result(None)
        await until_change(supervisor, lambda: supervisor.cluster.workers["decode-0"].phase is Phase.DRAINING)
        old.drained.set()
        await until_change(supervisor, lambda: supervisor.cluster.settled)
        assert set(supervisor.cluster.workers) == {"prefill-0", "decode-1"}


async def test_an_upgrade_replaces_all_and_a_second_one_waits_for_its_end(world: World) -> None:
    later = Build("aa", "0.2.0")
    async with supervising(world) as supervisor:
        await until_change(supervisor, lambda: supervisor.cluster.settled)
        for process in world.workers:
            process.drained.set()
        world.routers[0].left.set()
        await supervisor.upgrade(later, b"a wheel")
        assert world.wheels == {later: b"a wheel"}
        assert world.remembered.build == later
        with pytest.raises(ConfigError, match="for another upgrade"):
            await supervisor.upgrade(Build("bb", "0.3.0"), b"another")
        cluster = supervisor.cluster
        await until_change(supervisor, lambda: cluster.settled and cluster.upgrade.is_done(cluster.slots.values()))
        assert set(cluster.slots) == {"prefill-1", "decode-1", "router-1"}
        assert set(world.builds.values()) == {INSTALLED, later}


@pytest.mark.long
async def test_a_drain_beyond_its_time_ends_in_a_kill(world: World) -> None:
    async with supervising(world) as supervisor:
        await until_change(supervisor, lambda: supervisor.cluster.settled)
        old = world.named("decode-0")
        await supervisor.drain("decode-0", replace_first=False, timeout_s=0.2)
        await until_change(supervisor, lambda: old.was_killed)
        await until_change(supervisor, lambda: supervisor.cluster.settled)
        assert world.named("decode-0") is not old


async def test_where_there_is_no_room_for_both_the_old_one_goes_first_and_says_so(world: World) -> None:
    def full(added: dict[Role, int]) -> None:
        raise ConfigError("1 more workers need 2 GiB")

    async with supervising(world) as supervisor:
        await until_change(supervisor, lambda: supervisor.cluster.settled)
        supervisor._check_room = full
        await supervisor.drain("decode-0", replace_first=True, timeout_s=60)
        slot = supervisor.cluster.workers["decode-0"]
        assert slot.phase is Phase.DRAINING
        assert "it goes before its successor starts: 1 more workers need 2 GiB" in slot.note
        world.named("decode-0").drained.set()
        await until_change(supervisor, lambda: supervisor.cluster.settled)


async def test_a_drain_of_nobody_or_of_one_that_leaves_is_refused(world: World) -> None:
    async with supervising(world) as supervisor:
        await until_change(supervisor, lambda: supervisor.cluster.settled)
        with pytest.raises(ConfigError, match="there is no worker decode-9; there are decode-0, prefill-0"):
            await supervisor.drain("decode-9", replace_first=True, timeout_s=60)
        await supervisor.drain("decode-0", replace_first=False, timeout_s=60)
        with pytest.raises(ConfigError, match="leaving already"):
            await supervisor.drain("decode-0", replace_first=False, timeout_s=60)


async def test_a_later_supervisor_tells_of_what_ended_meanwhile_and_goes_on_with_a_drain(world: World) -> None:
    old, receiver = [
        await world.serve(ScriptedWorkerProcess(name=f"decode-{n}", incarnation=f"old-{n}", started=True))
        for n in range(2)
    ]
    old.draining = True
    for worker in (old, receiver):
        worker.loaded.set_result(None)
    world.found = Found([old, receiver], ["prefill-that-ended"])
    world.memory = Memory(2, Intent({Role.PREFILL: 1, Role.DECODE: 1, Role.ROUTER: 1}))
    async with supervising(world) as supervisor:
        await world.until_noted(lambda: ("prefill-that-ended",) in world.notes)
        old.drained.set()
        await until_change(supervisor, lambda: supervisor.cluster.settled)
        assert set(supervisor.cluster.workers) == {"prefill-0", "decode-1"}


@pytest.mark.long
async def test_a_host_that_stood_still_kills_nobody_when_it_goes_on(world: World) -> None:
    async with supervising(world, 2, 2, policy=IMPATIENT) as supervisor:
        await until_change(supervisor, lambda: supervisor.cluster.settled)
        await asyncio.sleep(0.35)  # heartbeats are under way
        time.sleep(2 * IMPATIENT.silence_s)  # noqa: ASYNC251 - everything stands still: the supervisor and what it would listen to
        await asyncio.sleep(IMPATIENT.silence_s)
        assert not any(worker.was_killed for worker in world.workers)
        assert not any(router.was_killed for router in world.routers)
        world.deaf = True  # and it still sees who is silent
        await until_change(supervisor, lambda: world.workers[0].was_killed)
        world.deaf = False


async def test_a_shutdown_goes_on_when_nobody_waits_for_it_any_more(world: World) -> None:
    async with running(world) as (supervisor, run):
        asking = await patient_shutdown(world, supervisor)
        asking.cancel()  # Ctrl-C in `tandem stop`
        await asyncio.gather(asking, return_exceptions=True)
        assert not supervisor.cluster.stopping
        world.requests_end.set()
        await asyncio.wait_for(run, LONG_S)
        assert supervisor.cluster.closed


async def test_a_second_call_shortens_the_grace(world: World) -> None:
    async with running(world) as (supervisor, run):
        patient = await patient_shutdown(world, supervisor)
        await asyncio.wait_for(supervisor.shut_down(grace_s=0), LONG_S)
        await asyncio.wait_for(asyncio.gather(patient, run), LONG_S)


async def test_a_worker_is_told_of_many_ends_in_few_calls(world: World) -> None:
    """Else a node that goes with many workers costs as many calls as there are pairs of workers."""
    async with supervising(world, prefill=1, decode=2) as supervisor:
        await until_change(supervisor, lambda: supervisor.cluster.settled)
        ended = [f"ended-{n}" for n in range(50)]
        for life in ended:
            supervisor._feed(ProcessEnded(life))
        await world.until_noted(lambda: sum(len(set(note)) for note in world.notes) >= 3 * len(ended))
        assert set().union(*world.notes) == set(ended)
        assert len(world.notes) <= 2 * 3


async def test_a_shutdown_is_remembered_and_a_later_supervisor_ends_it(world: World) -> None:
    async with running(world) as (first, _):
        asking = await patient_shutdown(world, first)
        assert await asyncio.to_thread(world.closing_remembered.wait, LONG_S)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    old = list(world.workers)
    world.found = Found([*old, world.routers[0]], [])
    world.memory = Memory(2, world.remembered)
    world.asked_to_drain.clear()
    second = Supervisor(world, wanted={}, heartbeat_s=0.1, policy=POLICY)
    answer = world.routers[0].start

    async def late() -> ProcessState:
        await second.opened.wait()
        for _ in range(20):  # turns of the loop, in which the shutdown goes on
            await asyncio.sleep(0)
        return await answer()

    world.routers[0].start = late  # type: ignore[method-assign]
    task = asyncio.create_task(second.run())
    await asyncio.wait_for(world.asked_to_drain.wait(), LONG_S)
    world.requests_end.set()
    await asyncio.wait_for(task, LONG_S)
    assert world.workers == old
    assert all(worker.ended.done() for worker in old)
