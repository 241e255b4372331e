"""A prefill worker is lost in the middle of a handoff: what decode has verified is neither computed nor sent again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from prefill_worker.worker import PrefillWorker
from tandem.core.sampling import SamplingParams
from tests.support.scripted_router import Ask, Router
from tests.support.waiting import until
from tests.support.worker_pair import (
    CONFIG,
    SHARED_LOOP,
    Gate,
    Oracle,
    Stash,
    WorkerPair,
    counted,
    make_worker,
    prompt_of,
)

pytest_plugins = ["tests.support.worker_pair"]
pytestmark = SHARED_LOOP

GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
SAMPLED = SamplingParams(temperature=1.0, seed=7, max_tokens=40, ignore_eos=True)


@asynccontextmanager
async def half_handed_off(pair: WorkerPair, router: Router, ask: Ask) -> AsyncIterator[None]:
    """Prefill stands still in the third of four chunks; decode has verified the four pages of the first two."""
    with Gate(pair.prefill.parts.engine, "forward", first=2), Stash(pair.prefill, "confirm_idle"):
        with Gate(pair.prefill.parts.engine, "forward"):
            await router.begin(ask)
            await router.until_attached(ask)
        record = pair.decode.driver._handoffs.record(ask.key)
        assert record is not None
        await until(lambda: len(record.verified) == 4, "four verified pages")
        # The router takes prefill for lost.
        await router.cancel(ask, "decode")
        yield
        await router.cancel(ask, "prefill")


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "seeded"])
async def test_decode_computes_the_rest_of_what_a_lost_prefill_has_sent(
    pair: WorkerPair, params: SamplingParams
) -> None:
    prompt = prompt_of(100)
    async with Router(pair) as router:
        (whole,) = await router.ask(Ask(prompt, params, n=2))
        await pair.settled()
        pair.drop_caches()
        ask = Ask(prompt, params, n=2)
        async with half_handed_off(pair, router, ask):
            with counted(pair, computed=36, cached=64):
                again = Ask(prompt, params, n=2, request_id=ask.request_id, attempt=2, local=36)
                (outcome,) = await router.ask(again)
            quarantined = pair.on_runner(pair.decode, pair.decode.parts.pool.counts).quarantined
            assert quarantined == 3, "prefill may still write what it has not reported"
        assert outcome.kinds == ["decode.local"]
        assert [outcome.ids(c) for c in range(2)] == [whole.ids(c) for c in range(2)]


async def test_another_prefill_worker_sends_only_the_rest(
    pair: WorkerPair, oracle: Oracle, worker_model_dir: Path
) -> None:
    second = make_worker(PrefillWorker, worker_model_dir, 64, CONFIG, name="prefill-1")
    loop = asyncio.get_running_loop()
    await loop.run_in_executor(None, second.start)
    try:
        other = WorkerPair(second, pair.decode_process)
        async with Router(pair) as router, Router(other) as elsewhere:
            ask = Ask(prompt_of(100))
            async with half_handed_off(pair, router, ask):
                again = Ask(ask.prompt, request_id=ask.request_id, attempt=2)
                (outcome,) = await elsewhere.ask(again)
                await elsewhere.heard(again, "prefill.handoff_done")
            assert outcome.grant is not None
            assert outcome.done is not None
            assert outcome.grant.num_cached_pages == 4
            assert outcome.done.num_extents == 3 * 3
            assert outcome.ids() == oracle.greedy(ask.prompt, 12)
    finally:
        await loop.run_in_executor(None, second.stop)
