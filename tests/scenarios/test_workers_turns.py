"""Workers that share cores: prefill rests while decode computes the first step of what it was handed off."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from prefill_worker import prompts
from tandem.worker.core_shares import CoreShares
from tests.scenarios.worker_pair import SHARED_LOOP, Gate, Oracle, WorkerPair, prompt_of, until
from tests.scenarios.worker_router import Ask, Router

pytest_plugins = ["tests.scenarios.worker_pair"]
pytestmark = SHARED_LOOP


@contextlib.contextmanager
def shared_cores(pair: WorkerPair, path: Path) -> Iterator[None]:
    """They tell each other of rests and first steps; threads are not lent, as both are in one process."""
    workers = pair.prefill, pair.decode
    for worker in workers:
        worker.shares = CoreShares(path, 1)
    try:
        yield
    finally:
        for worker in workers:
            assert worker.shares is not None
            worker.shares.leave()
            worker.shares = None


@contextlib.asynccontextmanager
async def one_behind_the_other(pair: WorkerPair, router: Router) -> AsyncIterator[tuple[Ask, Ask]]:
    """Decode stands in the first step of a prompt, and another one waits at prefill; each takes a step."""
    with Gate(pair.decode.engine, "forward") as decode:
        with Gate(pair.prefill.engine, "forward") as prefill:
            first = await router.begin(Ask(prompt_of(32)))
            await prefill.wait()
            await router.until_attached(first)
            second = await router.begin(Ask(prompt_of(32, seed=1)))
            await router.until_attached(second)
        await decode.wait()
        yield first, second


async def test_prefill_gives_way_to_the_first_step(
    pair: WorkerPair, oracle: Oracle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompts, "_MOST_OF_A_STEP", 1e3)
    with shared_cores(pair, tmp_path / "shares"):
        theirs, own = pair.prefill.shares, pair.decode.shares
        assert theirs is not None
        assert own is not None
        async with Router(pair) as router:
            with Gate(theirs, "give_way") as giving:
                giving.open()
                async with one_behind_the_other(pair, router) as (first, second):
                    await giving.wait()
                    await until(lambda: own.borrow() == 1, "rest")
                    assert pair.prefill.prompts.jobs[second.key].started_s is None
                for ask in (first, second):
                    assert (await router.finish(ask)).ids() == oracle.greedy(ask.prompt, 12)
            assert theirs.first_steps(pair.decode.info.pid) == 2
        await pair.settled()


async def test_prefill_gives_way_for_part_of_a_step_only(pair: WorkerPair, tmp_path: Path) -> None:
    """Decode stands still: its next prompt is computed nevertheless."""
    with shared_cores(pair, tmp_path / "shares"):
        async with Router(pair) as router:
            async with one_behind_the_other(pair, router) as (first, second):
                await until(lambda: pair.prefill.prompts.jobs[second.key].computed, "the second prompt")
            for ask in (first, second):
                await router.finish(ask)
        await pair.settled()


async def test_prefill_does_not_give_way_to_those_who_share_nothing(
    pair: WorkerPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompts, "_MOST_OF_A_STEP", 1e3)
    async with Router(pair) as router:
        async with one_behind_the_other(pair, router) as (first, second):
            await until(lambda: pair.prefill.prompts.jobs[second.key].computed, "the second prompt")
        for ask in (first, second):
            await router.finish(ask)
    await pair.settled()
