"""Workers that share cores: prefill rests while decode computes the first step of what it was handed off."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tandem.worker.cpu import pacing
from tandem.worker.cpu.core_shares import CoreShares
from tests.support.scripted_router import Ask, Router
from tests.support.waiting import until
from tests.support.worker_pair import SHARED_LOOP, Gate, Oracle, WorkerPair, prompt_of

pytest_plugins = ["tests.support.worker_pair"]
pytestmark = SHARED_LOOP


@dataclass
class Shares:
    """What both workers have of the node's cores."""

    pair: WorkerPair
    prefill: CoreShares
    decode: CoreShares
    begun: threading.Event = field(default_factory=threading.Event)  # prefill gives way
    ended: threading.Event = field(default_factory=threading.Event)

    @property
    def num_first_steps(self) -> int | None:
        return self.prefill.first_steps(self.pair.decode.parts.info.pid)

    def give_way(self, pid: int, number: int, until_s: float) -> None:
        self.begun.set()
        CoreShares.give_way(self.prefill, pid, number, until_s)
        self.ended.set()


@pytest.fixture
def shares(pair: WorkerPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shares]:
    """They tell each other of rests and first steps; threads are not lent, as both workers are in one process."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    both = Shares(pair, CoreShares(tmp_path / "shares", 1), CoreShares(tmp_path / "shares", 1))
    both.prefill.give_way = both.give_way  # type: ignore[method-assign]

    def share(prefill: CoreShares | None, decode: CoreShares | None) -> None:
        pair.on_runner(pair.prefill, lambda: setattr(pair.prefill.parts.pacing, "_shares", prefill))
        pair.on_runner(pair.decode, lambda: setattr(pair.decode.parts.pacing, "_shares", decode))

    share(both.prefill, both.decode)
    yield both
    share(None, None)
    pair.on_runner(pair.prefill, pair.prefill.parts.pacing._go_first.clear)
    both.prefill.leave()
    both.decode.leave()


@contextlib.asynccontextmanager
async def one_behind_the_other(pair: WorkerPair, router: Router) -> AsyncIterator[tuple[Ask, Ask]]:
    """Decode stands in the first step of a prompt, and another one waits at prefill; each takes a step."""
    with Gate(pair.decode.parts.engine, "forward") as decode:
        with Gate(pair.prefill.parts.engine, "forward") as prefill:
            first = await router.begin(Ask(prompt_of(32)))
            await prefill.wait()
            await router.until_attached(first)
            second = await router.begin(Ask(prompt_of(32, seed=1)))
            await router.until_attached(second)
            if pair.prefill.parts.pacing._shares is not None:
                pair.prefill.parts.pacing._shares.borrow()  # as its kernels do
        await decode.wait()
        yield first, second


def without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pacing, "_MOST_OF_A_STEP", 1e6)
    monkeypatch.setattr(pacing, "_LONGEST_REST_S", 5.0)


async def test_prefill_gives_way_to_the_first_step(
    pair: WorkerPair, shares: Shares, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_end(monkeypatch)
    async with Router(pair) as router:
        async with one_behind_the_other(pair, router) as (first, second):
            await until(shares.begun.is_set, "a rest")
            await until(lambda: shares.decode.borrow() == 1, "prefill's thread")
            assert not shares.ended.wait(0.1)
            assert pair.prefill.core.jobs[second.key].started_s is None
        await until(shares.ended.is_set, "the end of the rest")
        for ask in (first, second):
            assert (await router.finish(ask)).ids() == oracle.greedy(ask.prompt, 12)
    assert shares.num_first_steps == 2


async def test_what_comes_while_prefill_gives_way_counts_for_its_next_step(
    pair: WorkerPair, shares: Shares, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_end(monkeypatch)
    heard_by_prefill: list[str] = []
    take = pair.prefill.command

    def heard(session: int, command: Any) -> None:
        take(session, command)
        heard_by_prefill.append(command.WhichOneof("command"))

    monkeypatch.setattr(pair.prefill, "command", heard)
    async with Router(pair) as router:
        async with one_behind_the_other(pair, router) as (first, second):
            await until(shares.begun.is_set, "a rest")
            await router.cancel(second, "prefill")
            await until(lambda: "cancel" in heard_by_prefill, "the cancel")
        await router.finish(first)
        await router.cancel(second, "decode")
        await pair.settled()
        assert "prefill.started" not in router.outcomes[second.key].kinds


async def test_prefill_gives_way_for_part_of_a_step_only(pair: WorkerPair, shares: Shares) -> None:
    """Decode stands still: its next prompt is computed nevertheless."""
    async with Router(pair) as router:
        async with one_behind_the_other(pair, router) as (first, second):
            await router.heard(second, "prefill.handoff_done")
            assert shares.ended.is_set()
            assert shares.num_first_steps == 0
        for ask in (first, second):
            await router.finish(ask)


@pytest.mark.parametrize("shared", ["nothing", "a host", "a file"])
async def test_prefill_does_not_give_way_to_those_who_do_not_share_its_cores(
    pair: WorkerPair, shares: Shares, monkeypatch: pytest.MonkeyPatch, shared: str
) -> None:
    without_end(monkeypatch)
    if shared == "nothing":
        pair.on_runner(pair.prefill, lambda: setattr(pair.prefill.parts.pacing, "_shares", None))
    async with Router(pair) as router:
        told = router.infos["decode"]
        if shared == "a host":
            told.pid = 1
        elif shared == "a file":
            told.host_id = "another"
            pair.prefill.parts.pacing.left(told.incarnation)  # whom other tests have let it meet
        async with one_behind_the_other(pair, router) as (first, second):
            await router.heard(second, "prefill.handoff_done")
            assert not shares.begun.is_set()
        for ask in (first, second):
            await router.finish(ask)


async def test_choices_of_a_request_take_one_first_step_and_prompts_of_decodes_own_none(
    pair: WorkerPair, shares: Shares
) -> None:
    async with Router(pair) as router:
        await router.ask(Ask(prompt_of(40), n=3))
        assert shares.num_first_steps == 1
        await router.ask(Ask(prompt_of(40, seed=1), local=40))
        assert shares.num_first_steps == 1


async def test_a_request_that_ends_before_its_first_step_is_not_waited_for(pair: WorkerPair, shares: Shares) -> None:
    async with Router(pair) as router:
        async with one_behind_the_other(pair, router) as (first, second):
            await router.heard(second, "prefill.handoff_done")
            await router.cancel(second)
            # Behind the admission, in decode's inbox.
            await until(lambda: pair.decode.parts.runner._inbox.qsize() > 1, "the cancel")
        await router.finish(first)
        await pair.settled()
        assert shares.num_first_steps == 2
        assert not router.outcomes[second.key].tokens[0].keys() - {0}
