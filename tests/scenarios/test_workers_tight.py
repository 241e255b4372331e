"""The tightest pools: each just large enough for one request, or for two. All requests end, with the right tokens."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tandem.core.sampling import SamplingParams
from tests.support.scripted_router import Ask, Router
from tests.support.waiting import until
from tests.support.worker_pair import CONFIG, PAGE, SHARED_LOOP, Oracle, WorkerPair, prompt_of, running_pair

pytest_plugins = ["tests.support.worker_pair"]
pytestmark = SHARED_LOOP

NUM_OUTPUT = 12
LONGEST = 5 * PAGE - 10
PREFILL_PAGES, DECODE_PAGES = 5, 6  # of one longest request: its prompt, and its prompt with all output
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_OUTPUT, ignore_eos=True)


def tight(model_dir: Path, num_requests: int) -> Iterator[WorkerPair]:
    config = CONFIG | {
        "cache": {"page_size": PAGE, "prefix_cache": num_requests > 1},
        # A cancel in the middle of a write puts all pages of such a pool into quarantine, until the writer has heard.
        "transport": {"quarantine_cap": 1.0},
    }
    with running_pair(
        model_dir,
        prefill_pages=num_requests * PREFILL_PAGES,
        decode_pages=num_requests * DECODE_PAGES,
        config=config,
    ) as pair:
        yield pair


@pytest.fixture(scope="module")
def pair_for_one(worker_model_dir: Path) -> Iterator[WorkerPair]:
    yield from tight(worker_model_dir, 1)


@pytest.fixture(scope="module")
def pair_for_two(worker_model_dir: Path) -> Iterator[WorkerPair]:
    yield from tight(worker_model_dir, 2)


@pytest.fixture(params=[1, 2])
def tight_pair(request: pytest.FixtureRequest) -> WorkerPair:
    pair: WorkerPair = request.getfixturevalue("pair_for_one" if request.param == 1 else "pair_for_two")
    return pair


async def begin_in_any_order(router: Router, asks: list[Ask], rng: random.Random) -> None:
    """Each worker hears of the requests in an order of its own; of each one, prefill hears first."""
    to_start, to_reserve = rng.sample(asks, len(asks)), rng.sample(asks, len(asks))
    started: set[int] = set()
    while to_reserve:
        if id(to_reserve[0]) in started and (not to_start or rng.random() < 0.5):
            await router.reserve(to_reserve.pop(0))
        else:
            ask = to_start.pop(0)
            started.add(id(ask))
            await router.start(ask)


@pytest.mark.parametrize("seed", range(4))
async def test_all_end_whatever_the_order(tight_pair: WorkerPair, oracle: Oracle, seed: int) -> None:
    """Lengths, priorities, choices and both orders of arrival are random; two requests are cancelled on their way."""
    rng = random.Random(seed)
    async with Router(tight_pair) as router:
        asks = [
            Ask(prompt_of(rng.randint(PAGE, LONGEST), seed=n), GREEDY, n=rng.randint(1, 2), priority=rng.randint(0, 2))
            for n in range(7)
        ]
        await begin_in_any_order(router, asks, rng)
        cancelled, finished = asks[:2], asks[2:]
        for ask in cancelled:
            await router.until(lambda a=ask: router.outcomes[a.key].tokens, "a first token")  # type: ignore[misc]
            await router.cancel(ask)
        for outcome, ask in zip(await asyncio.gather(*map(router.finish, finished)), finished, strict=True):
            for choice in range(ask.n):
                assert outcome.ids(choice) == oracle.greedy(ask.prompt, NUM_OUTPUT)
        await tight_pair.settled()


async def test_prompts_that_wait_for_decode_give_way_to_the_one_that_decode_waits_for(
    tight_pair: WorkerPair, oracle: Oracle
) -> None:
    """An unimportant request has decode's pages; important ones fill prefill's pool and wait for just these pages."""
    pair = tight_pair
    prompts = [prompt_of(LONGEST, seed=n) for n in range(3)]
    async with Router(pair) as router:
        router.attaches = False
        # Decode takes one request at a time: its cap on reserved pages sees to it.
        low = await router.reserve(Ask(prompts[0], GREEDY, n=2, priority=9))
        await router.heard(low, "decode.granted")
        num_high = pair.prefill.parts.pool.num_pages // PREFILL_PAGES
        high = [Ask(prompt, GREEDY) for prompt in prompts[1 : 1 + num_high]]
        pair.limit(pair.prefill, unpromoted_share=1)
        before = pair.prefill.parts.counters.num_preemptions
        for ask in high:
            await router.begin(ask)
        await until(lambda: len(pair.prefill.parts.scheduler.parked) == num_high, "prompts that wait for decode")
        assert not any(router.outcomes[ask.key].grant for ask in high)
        router.attaches = True
        await router.start(low)
        await router.attach(low)
        for ask in (low, *high):
            outcome = await router.finish(ask)
            for choice in range(ask.n):
                assert outcome.ids(choice) == oracle.greedy(ask.prompt, NUM_OUTPUT)
        assert pair.prefill.parts.counters.num_preemptions > before
        await pair.settled()


async def test_urgency_goes_before_age_until_the_age_is_worth_more(pair_for_two: WorkerPair, oracle: Oracle) -> None:
    """Twenty levels are worth 200 seconds. A retry brings the age of its request along."""
    pair = pair_for_two
    low = Ask(prompt_of(20, seed=1), GREEDY, priority=20, age_s=100)
    urgent = Ask(prompt_of(20, seed=2), GREEDY)
    retried = Ask(prompt_of(20, seed=3), GREEDY, priority=20, age_s=300, attempt=2)
    async with Router(pair) as router:
        with pair.hogged(pair.prefill, num_free=0), pair.hogged(pair.decode, num_free=0):
            for ask in (low, urgent, retried):
                await router.begin(ask)
            waiting = pair.decode.core.ledger.waiting
            await until(lambda: len(pair.prefill.parts.scheduler.waiting) == len(waiting) == 3, "all to wait")
            order = [ask.request_id for ask in (retried, urgent, low)]
            assert [s.request_id for s in pair.prefill.parts.scheduler.waiting] == order
            assert [r.key.request_id for r in waiting] == order
        for worker in (pair.prefill, pair.decode):
            pair.on_runner(worker, lambda: None)
        for ask in (low, urgent, retried):
            assert (await router.finish(ask)).ids() == oracle.greedy(ask.prompt, NUM_OUTPUT)
        await pair.settled()


async def test_prefill_stops_admitting_above_the_watermark(pair_for_two: WorkerPair, oracle: Oracle) -> None:
    """No grant comes: of three prompts of three pages each, two are computed, and the third waits with no pages."""
    pair = pair_for_two
    old = pair.limit(pair.prefill, unpromoted_share=0.75)  # type: ignore[arg-type]
    async with Router(pair) as router:
        asks = [Ask(prompt_of(40, seed=n), GREEDY) for n in range(3)]
        with pair.hogged(pair.decode, num_free=2):
            for ask in asks:
                await router.begin(ask)
            scheduler = pair.prefill.parts.scheduler
            await until(lambda: len(scheduler.parked) == 2 and len(scheduler.waiting) == 1, "the watermark")
            assert pair.on_runner(pair.prefill, pair.prefill.parts.pool.counts).used == 6
            pair.on_runner(pair.prefill, lambda: None)
            assert len(scheduler.waiting) == 1
        pair.on_runner(pair.decode, lambda: None)
        for ask in asks:
            assert (await router.finish(ask)).ids() == oracle.greedy(ask.prompt, NUM_OUTPUT)
        await pair.settled()
    pair.prefill.parts.scheduler.limits = old


async def test_what_can_never_fit_is_refused_at_once(tight_pair: WorkerPair) -> None:
    pair = tight_pair
    too_long = prompt_of(pair.prefill.parts.pool.num_pages * PAGE + 1)
    async with Router(pair) as router:
        ask = await router.start(Ask(too_long, GREEDY))
        await router.until(lambda: "prefill" in router.outcomes[ask.key].failures, "the refusal")
        error = router.outcomes[ask.key].failures["prefill"]
        assert (error.code, error.retryable) == ("invalid_request", False)
        num_pages = pair.prefill.parts.pool.num_pages
        assert f"{len(too_long)} tokens need {num_pages + 1} pages, this worker has {num_pages}" in error.message
        await pair.settled()
