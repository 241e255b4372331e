"""A worker that changes its role, as the supervisor's shell carries it out, against processes that exist only here."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from tandem.cluster.supervisor.supervisor import Supervisor
from tandem.core.errors import ConfigError
from tandem.core.identity import Role
from tests.support.scripted_processes import (
    POLICY,
    ScriptedWorkerProcess,
    World,
    processes,
    supervising,
    until_change,
)
from tests.support.waiting import LONG_S, until


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with processes() as world:
        yield world


async def scaled(world: World, supervisor: Supervisor, *, can_change: bool) -> tuple[ScriptedWorkerProcess, ...]:
    """Two prefill workers and one decode worker are to be one and two; who leaves prefill, and what it may become."""
    supervisor.cluster.policy = replace(POLICY, flexible=1)
    await until_change(supervisor, lambda: supervisor.cluster.settled)
    leaving = world.named("prefill-1")
    heir = await world.serve(ScriptedWorkerProcess())
    heir.loaded.set_result(None)
    leaving.heir = heir if can_change else None
    await supervisor.scale({Role.DECODE: 2, Role.PREFILL: 1})
    return leaving, heir


async def test_its_process_goes_on_and_is_followed_in_its_new_role(world: World) -> None:
    async with supervising(world, 2, 1) as supervisor:
        leaving, heir = await scaled(world, supervisor, can_change=True)
        num_started = len(world.workers)
        leaving.drained.set()
        await until_change(supervisor, lambda: supervisor.cluster.settled)
        assert heir.name == "decode-1"
        assert supervisor.cluster.workers["decode-1"].incarnation == heir.incarnation != leaving.incarnation
        assert len(world.workers) == num_started == 3
        assert not leaving.was_killed
        assert not heir.was_killed
        await world.until_noted(lambda: (leaving.incarnation,) in world.notes)  # its end is a fence for the others
        heir.die()
        await until_change(supervisor, lambda: len(world.workers) == 4 and supervisor.cluster.settled)
        assert world.workers[-1].name == "decode-1"


async def test_one_that_cannot_change_ends_and_another_is_started(world: World) -> None:
    async with supervising(world, 2, 1) as supervisor:
        leaving, _ = await scaled(world, supervisor, can_change=False)
        leaving.drained.set()
        await until_change(supervisor, lambda: supervisor.cluster.settled)
        assert leaving.was_killed
        assert world.workers[-1].name == "decode-1"


@pytest.mark.long
async def test_one_that_does_not_stop_is_killed_and_another_is_started(world: World) -> None:
    async with supervising(world, 2, 1) as supervisor:
        leaving, heir = await scaled(world, supervisor, can_change=True)
        leaving.ignores_stop = True
        leaving.drained.set()
        await until_change(supervisor, lambda: supervisor.cluster.settled)
        assert leaving.was_killed
        assert not heir.name
        assert world.workers[-1].name == "decode-1"


async def test_one_that_changed_for_nobody_is_killed(world: World) -> None:
    async with supervising(world, 2, 1) as supervisor:
        leaving, heir = await scaled(world, supervisor, can_change=True)
        leaving.ignores_stop = True
        leaving.drained.set()
        await until(lambda: bool(leaving.num_stops), "the order", LONG_S)
        await supervisor.scale({Role.DECODE: 1})
        leaving.ignores_stop = False
        leaving.stop()
        await asyncio.wait_for(asyncio.shield(heir.gone), LONG_S)
        assert set(supervisor.cluster.workers) == {"prefill-0", "decode-0"}


async def test_what_is_taken_over_needs_no_room(world: World) -> None:
    async with supervising(world, 2, 1) as supervisor:
        supervisor.cluster.policy = replace(POLICY, flexible=1)
        await until_change(supervisor, lambda: supervisor.cluster.settled)

        def full(added: dict[Role, int]) -> None:
            raise ConfigError(f"no room for {added}", key="memory")

        supervisor._check_room = full
        with pytest.raises(ConfigError, match="no room for"):
            await supervisor.scale({Role.DECODE: 2})
        await supervisor.scale({Role.DECODE: 2, Role.PREFILL: 1})
        world.named("prefill-1").drained.set()
