"""A supervisor whose pools follow their load, against processes that exist only here and counts that they tell."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

import pytest

from tandem.cluster.supervisor import autoscale, load_figures, load_listener
from tandem.cluster.supervisor.autoscale import Decision, Range
from tandem.cluster.supervisor.supervisor import Supervisor
from tandem.core.config import MAX_POOL
from tandem.core.errors import ConfigError
from tandem.core.identity import Role
from tandem.rpc.v1.common_pb2 import PageCounts, WorkerStatus
from tests.support.scripted_processes import (
    POLICY,
    ScriptedWorkerProcess,
    World,
    processes,
    running,
    until_change,
)
from tests.support.waiting import LONG_S, until


@pytest.fixture
async def world(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    monkeypatch.setattr(load_figures, "WARM_UP_S", 0.0)
    monkeypatch.setattr(load_listener, "SILENT_BEATS", 600)  # nobody is silent while this process waits for a core
    async with processes() as world:
        yield world


@asynccontextmanager
async def loaded(world: World, workers_worth: float) -> AsyncIterator[None]:
    """Prompts come, of which `workers_worth` prefill workers are always busy; each of those that run is. Decode workers
    that tell of themselves have little to do."""

    async def count() -> None:
        while True:
            world.load.num_requests += 1000
            world.load.prompt_tokens += 1000.0 * workers_worth
            for worker in world.workers:
                if worker.role is Role.PREFILL:
                    status = world.statuses.setdefault(worker.name, WorkerStatus())
                    status.steps += 10
                    status.busy_s += 0.1
                    status.prompt_tokens_computed += 1000
                elif (told := world.statuses.get(worker.name)) is not None:
                    told.steps += 1
                    told.busy_s += 0.01
                    told.decode_tokens += 1
            await asyncio.sleep(0.1)

    counting = asyncio.create_task(count())
    try:
        yield
    finally:
        counting.cancel()
        with suppress(asyncio.CancelledError):
            await counting


def changes(supervisor: Supervisor, role: Role = Role.PREFILL) -> list[Decision]:
    return list(supervisor.follower.pools[role].changes)


async def grown(supervisor: Supervisor, num: int) -> None:
    await asyncio.wait_for(until_wanted(supervisor, lambda wanted: wanted >= num), 15)


async def until_wanted(supervisor: Supervisor, is_right: Callable[[int], bool]) -> None:
    async for _ in supervisor.changes():
        if is_right(supervisor.cluster.wanted[Role.PREFILL]):
            return


@pytest.mark.long
async def test_a_pool_grows_with_its_load_and_tells_why(world: World, caplog: pytest.LogCaptureFixture) -> None:
    async with running(world) as (supervisor, _):
        await supervisor.scale({Role.PREFILL: 1}, {Role.PREFILL: 3})
        assert supervisor.cluster.sizes.ranges == {Role.PREFILL: Range(1, 3)}
        with caplog.at_level(logging.INFO):
            async with loaded(world, 1.9):
                await grown(supervisor, 3)
        assert world.remembered.ranges == {Role.PREFILL: Range(1, 3)}, "the next supervisor goes on"
        (change, *_) = changes(supervisor)
        assert change.before == 1
        assert "uncached prompt tokens" in change.why
        assert f"prefill grows from 1 to {change.wanted}: {change.why} (" in caplog.text
        assert "certain_load" in caplog.text
        assert supervisor.cluster.wanted[Role.DECODE] == 1
        await until_change(supervisor, lambda: supervisor.cluster.settled)
        sizes = await until(
            lambda: world.memberships[-1].pools[0], "the size that routers hear", wanted=lambda pool: pool.wanted == 3
        )
        assert (sizes.least, sizes.most) == (1, 3)
        assert sizes.num_grown >= 1


@pytest.mark.long
async def test_an_ordered_size_stays_whatever_the_load(world: World) -> None:
    async with running(world) as (supervisor, _):
        await supervisor.scale({Role.PREFILL: 1}, {Role.PREFILL: 8})
        async with loaded(world, 1.2):
            await grown(supervisor, 2)
            await supervisor.scale({Role.PREFILL: 1})
            assert supervisor.cluster.wanted[Role.PREFILL] == 1
            world.heartbeats.clear()
            for _ in range(10):
                await asyncio.wait_for(world.heartbeats.wait(), LONG_S)
                world.heartbeats.clear()
        assert supervisor.cluster.wanted[Role.PREFILL] == 1
        assert not supervisor.follower.pools


@pytest.mark.long
async def test_what_the_host_has_no_room_for_is_said_and_the_rest_is_had(world: World) -> None:
    full = 3

    def check_room(added: dict[Role, int]) -> None:
        if len(world.workers) - 1 + added.get(Role.PREFILL, 0) > full and not is_open:
            raise ConfigError("no memory is free")

    is_open = True
    async with running(world, check_room=check_room) as (supervisor, _):
        await until_change(supervisor, lambda: supervisor.cluster.settled)
        await supervisor.scale({Role.PREFILL: 1}, {Role.PREFILL: 8})
        is_open = False
        async with loaded(world, 5.0):
            async with asyncio.timeout(15):
                async for _ in supervisor.changes():
                    followed = supervisor.follower.pools.get(Role.PREFILL)
                    if followed and followed.changes and followed.changes[-1].refused:
                        break
        refused = changes(supervisor)[-1]
        assert refused.refused == "no memory is free"
        assert refused.wanted == supervisor.cluster.wanted[Role.PREFILL] <= full
        assert supervisor.cluster.sizes.told[0].num_refused == 1


@pytest.mark.long
async def test_a_worker_that_one_pool_spares_goes_to_the_other_and_it_is_told_why(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where there is room for no other."""

    def full(added: dict[Role, int]) -> None:
        raise ConfigError(f"no memory for {added}", key="memory")

    monkeypatch.setattr(autoscale, "SPARE_S", 0.3)
    async with running(world, 1, 2) as (supervisor, _):
        supervisor.cluster.policy = replace(POLICY, flexible=1)
        await until_change(supervisor, lambda: supervisor.cluster.settled)
        for name in ("decode-0", "decode-1"):
            world.statuses[name] = WorkerStatus(pages=PageCounts(free=1000))
        heir = await world.serve(ScriptedWorkerProcess())
        heir.loaded.set_result(None)
        leaving = world.named("decode-1")
        leaving.heir = heir
        leaving.drained.set()
        await supervisor.scale({Role.PREFILL: 1, Role.DECODE: 1}, {Role.PREFILL: 3, Role.DECODE: 3})
        supervisor.follower._check_room = full
        with caplog.at_level(logging.INFO):
            async with loaded(world, 1.2):
                await asyncio.wait_for(until_wanted(supervisor, lambda wanted: wanted == 2), 15)
                await until_change(supervisor, lambda: supervisor.cluster.settled)
        assert heir.name == "prefill-1"
        assert supervisor.cluster.wanted[Role.DECODE] == 1
        assert {slot.name for slot in supervisor.cluster.workers.values()} == {"prefill-0", "prefill-1", "decode-0"}
        for role, by in ((Role.PREFILL, 1), (Role.DECODE, -1)):
            change = next(each for each in changes(supervisor, role) if not each.refused)
            assert change.wanted - change.before == by
            assert change.why.startswith("a worker goes from decode to prefill: uncached prompt tokens need")
            assert "decode had 1 to spare" in change.why
            assert {"prefill_certain_load", "decode_certain_load"} <= change.inputs.keys()
        assert "a worker goes from decode to prefill" in caplog.text
        await until(lambda: world.memberships[-1].pools[0].num_taken == 1, "what routers hear")


async def test_who_comes_from_the_other_pool_needs_no_room(world: World) -> None:
    asked: list[dict[Role, int]] = []
    async with running(world, 2, 1) as (supervisor, _):
        supervisor.cluster.policy = replace(POLICY, flexible=1)
        await until_change(supervisor, lambda: supervisor.cluster.settled)
        await supervisor.scale({Role.PREFILL: 1})
        supervisor.follower._check_room = asked.append
        grown = await supervisor.follower._within_room(Decision(Role.DECODE, 0.0, 1, 3, ""))
        assert grown.wanted == 3
        assert asked == [{Role.DECODE: 1}]
        world.named("prefill-1").drained.set()


@pytest.mark.parametrize(("least", "most"), [(3, 2), (0, 2), (1, MAX_POOL + 1)])
async def test_a_range_that_cannot_be_is_refused(world: World, least: int, most: int) -> None:
    async with running(world) as (supervisor, _):
        with pytest.raises(ConfigError, match="--prefill"):
            await supervisor.scale({Role.PREFILL: least}, {Role.PREFILL: most})
        assert not supervisor.cluster.sizes.ranges


async def test_a_decode_pool_follows_no_load_without_prefill_workers(world: World) -> None:
    async with running(world) as (supervisor, _):
        await supervisor.scale({Role.DECODE: 1}, {Role.DECODE: 3})
        with pytest.raises(ConfigError, match="cannot without prefill workers"):
            await supervisor.scale({Role.PREFILL: 0})
        await supervisor.scale({Role.PREFILL: 0, Role.DECODE: 1})
        with pytest.raises(ConfigError, match="cannot without prefill workers"):
            await supervisor.scale({Role.DECODE: 1}, {Role.DECODE: 3})
        await supervisor.scale({Role.PREFILL: 1, Role.DECODE: 1}, {Role.DECODE: 3})
