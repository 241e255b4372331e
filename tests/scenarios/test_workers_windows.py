"""A model whose layers all see a window only: pages behind it are given back, and the tokens are transformers' own.

Its contexts are many times as long as the pools of both workers together.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from decode_worker.worker import DecodeWorker
from tandem.core.pages import num_hidden_pages, pages_for
from tandem.core.tiers import Rate
from tandem.engine.random_model import ModelSpec, save
from tandem.rpc.v1 import common_pb2 as pb
from tandem.worker.process import WorkerProcess
from tests.support.scripted_router import Ask, Outcome, Router
from tests.support.waiting import until
from tests.support.worker_pair import (
    CONFIG,
    PAGE,
    SHARED_LOOP,
    Oracle,
    WorkerPair,
    make_worker,
    most_held,
    params,
    prompt_of,
    running_pair,
)

pytestmark = SHARED_LOOP

WINDOW = 40  # ends within a page
NUM_PAGES = 14  # 224 tokens
MOST_PAGES = 6  # for the window and a chunk of 32, wherever they begin
MOST_DECODING = 4  # for the window, and the page that is written to
ALL = 4096  # more than any prompt has


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    spec = ModelSpec(arch="mistral", std=0.2, layers=3, max_positions=2048, sliding_window=WINDOW, seed=1)
    return save(spec, tmp_path_factory.mktemp("mistral") / "model")


@pytest.fixture(scope="module")
def windowed_oracle(model_dir: Path) -> Oracle:
    return Oracle(model_dir)


@pytest.fixture(scope="module", params=["plain", "looking up"])
def shared_windowed(request: pytest.FixtureRequest, model_dir: Path) -> Iterator[WorkerPair]:
    speculation = {"speculation": {"lookup_tokens": 5}} if request.param == "looking up" else {}
    sizes = {"prefill_pages": NUM_PAGES, "decode_pages": NUM_PAGES}
    with running_pair(model_dir, **sizes, config=CONFIG | speculation) as pair:
        yield pair


@pytest.fixture
def windowed(shared_windowed: WorkerPair) -> WorkerPair:
    shared_windowed.drop_caches()
    return shared_windowed


@pytest.fixture(scope="module")
def second_decode(model_dir: Path) -> Iterator[WorkerProcess[DecodeWorker]]:
    worker = make_worker(DecodeWorker, model_dir, NUM_PAGES, CONFIG, "decode-1")
    try:
        worker.start()
        yield worker
    finally:
        worker.stop()


@pytest.mark.parametrize("local", [0, ALL], ids=["handed off", "computed at decode"])
async def test_tokens_are_those_of_transformers(windowed: WorkerPair, windowed_oracle: Oracle, local: int) -> None:
    """Prompts around the window and far beyond it, and an output that leaves its prompt behind."""
    lengths = (1, WINDOW - 1, WINDOW, WINDOW + 1, 57, 200, 700)
    asks = [Ask(prompt_of(length), params(), local=local) for length in lengths]
    asks.append(Ask(prompt_of(20, seed=1), params(150), local=local))
    async with Router(windowed) as router:
        for ask, outcome in zip(asks, await router.ask(*asks), strict=True):
            assert outcome.ids() == windowed_oracle.greedy(ask.prompt, ask.params.max_tokens)
            if not local:
                await router.heard(ask, "prefill.handoff_done")
                assert outcome.done is not None
                num_tokens = len(ask.prompt)
                num_sent = pages_for(num_tokens, PAGE) - num_hidden_pages(num_tokens, PAGE, WINDOW)
                assert outcome.done.num_extents == 3 * num_sent, "what no token sees is not sent"
    await windowed.settled()


@pytest.mark.parametrize("local", [0, ALL], ids=["handed off", "computed at decode"])
async def test_pages_stay_bounded_while_the_context_grows_ten_times(
    windowed: WorkerPair, windowed_oracle: Oracle, local: int
) -> None:
    for num_prompt, num_output in ((70, 15), (700, 150)):
        ask = Ask(prompt_of(num_prompt, seed=2), params(num_output), local=local)
        schedulers = [worker.parts.scheduler for worker in (windowed.prefill, windowed.decode)]
        with most_held(schedulers[0]) as at_prefill, most_held(schedulers[1]) as at_decode:
            async with Router(windowed) as router:
                (outcome,) = await router.ask(ask)
                await windowed.settled()
        assert outcome.ids() == windowed_oracle.greedy(ask.prompt, num_output)
        assert at_prefill["pages"] <= (0 if local else MOST_PAGES)
        assert at_decode["pages"] <= (MOST_PAGES if local else MOST_DECODING)
        windowed.drop_caches()


async def test_many_at_once_preempt_each_other_and_end(windowed: WorkerPair, windowed_oracle: Oracle) -> None:
    before = windowed.decode.parts.counters.num_preemptions
    # Four choices of one request alone need more pages than there are.
    asks = [Ask(prompt_of(20 + length, seed=3), params(60), n=4, local=ALL * (length % 2)) for length in range(3)]
    async with Router(windowed) as router:
        for ask, outcome in zip(asks, await router.ask(*asks), strict=True):
            expected = windowed_oracle.greedy(ask.prompt, 60)
            assert [outcome.ids(choice) for choice in range(4)] == [expected] * 4
    await windowed.settled()
    assert windowed.decode.parts.counters.num_preemptions > before


async def test_choices_share_what_they_see_of_their_prompt(windowed: WorkerPair) -> None:
    drawn = params(70, temperature=0.8, seed=11, num_logprobs=2)
    async with Router(windowed) as router:
        for local in (0, ALL):
            (together,) = await router.ask(Ask(prompt_of(150, seed=4), drawn, n=3, local=local))
            for choice in range(3):
                other = [n for n in range(3) if n != choice]
                ended = tuple(pb.ChoiceJournal(choice=n, token_ids=together.ids(n), finished=True) for n in other)
                (alone,) = await router.ask(Ask(prompt_of(150, seed=4), drawn, n=3, journal=ended, local=local))
                assert alone.ids(choice) == together.ids(choice)
                assert alone.logprobs[choice] == together.logprobs[choice]
    await windowed.settled()


@pytest.mark.parametrize("local", [0, ALL], ids=["handed off", "computed at decode"])
async def test_a_beginning_is_found_though_its_first_pages_are_gone(
    windowed: WorkerPair, windowed_oracle: Oracle, local: int
) -> None:
    """The next turn of a conversation: of what came before, the pages that it sees are enough."""
    first = Ask(prompt_of(150, seed=5), params(30), local=local)
    async with Router(windowed) as router:
        (outcome,) = await router.ask(first)
        await windowed.settled()
        worker = windowed.decode if local else windowed.prefill
        pool = worker.parts.pool
        num_left = MOST_DECODING + 1
        taken = windowed.on_runner(worker, lambda: pool.allocate(pool.num_available - num_left))
        assert taken is not None
        windowed.on_runner(worker, lambda: pool.release(taken))
        assert windowed.on_runner(worker, lambda: pool.counts().cached) == num_left, "the newest ones"
        turn = [*first.prompt, *(outcome.ids() if local else []), *prompt_of(25, seed=6)]
        again = Ask(turn, params(), local=local)
        (found,) = await router.ask(again)
        assert found.ids() == windowed_oracle.greedy(turn, 12)
        if local:
            assert found.local is not None
            assert found.local.num_cached_tokens == 179 // PAGE * PAGE
        else:
            await router.heard(again, "prefill.handoff_done")
            assert found.done is not None
            assert found.done.num_cached_tokens == 150 // PAGE * PAGE
    await windowed.settled()


async def test_where_a_seen_page_is_gone_nothing_is_taken_from_the_cache(
    windowed: WorkerPair, windowed_oracle: Oracle
) -> None:
    prompt, pool = prompt_of(100, seed=7), windowed.prefill.parts.pool
    async with Router(windowed) as router:
        await router.ask(Ask(prompt, params()))
        await windowed.settled()
        # 100 tokens end in the seventh page; of it on, tokens see the fourth.
        keys = windowed.on_runner(windowed.prefill, lambda: list(pool._page_of))
        windowed.on_runner(windowed.prefill, lambda: pool.discard(keys[-1:]))
        ask = Ask(prompt, params())
        (outcome,) = await router.ask(ask)
        await router.heard(ask, "prefill.handoff_done")
        assert outcome.ids() == windowed_oracle.greedy(prompt, 12)
    await windowed.settled()


@pytest.mark.parametrize("given", [{}, {"temperature": 0.8, "seed": 11}], ids=["greedy", "drawn"])
async def test_what_a_lost_decode_worker_had_goes_on_elsewhere(
    windowed: WorkerPair, second_decode: WorkerProcess[DecodeWorker], given: dict[str, Any]
) -> None:
    """Prefill has retained what is seen of the prompt, and computes nothing; decode replays the output."""
    other = WorkerPair(windowed.prefill_process, second_decode)
    ask = Ask(prompt_of(300, seed=8), params(90, **given))
    async with Router(windowed) as first, Router(other, "s") as second:
        (whole,) = await first.ask(ask)
        await first.heard(ask, "prefill.handoff_done")
        before = windowed.prefill.parts.counters.num_prompt_tokens_computed
        for attempt, num_known in ((2, 1), (3, 61)):
            journal = (pb.ChoiceJournal(choice=0, token_ids=whole.ids()[:num_known]),)
            again = dataclasses.replace(ask, attempt=attempt, journal=journal)
            (rest,) = await second.ask(again)
            assert rest.ids() == whole.ids()[num_known:]
        assert windowed.prefill.parts.counters.num_prompt_tokens_computed == before
        # Prefill is lost, too: decode computes all, and replays.
        windowed.on_runner(second_decode.worker, second_decode.parts.pool.drop_cache)
        journal = (pb.ChoiceJournal(choice=0, token_ids=whole.ids()[:61]),)
        alone: list[Outcome] = await second.ask(dataclasses.replace(ask, attempt=4, journal=journal, local=ALL))
        assert alone[0].ids() == whole.ids()[61:]
    await windowed.settled()
    await other.settled()


async def test_a_prompt_that_is_cancelled_in_its_middle_leaves_nothing(windowed: WorkerPair) -> None:
    async with Router(windowed) as router:
        for local in (0, ALL):
            ask = Ask(prompt_of(900, seed=9), params(), local=local)
            await (router.reserve(ask) if local else router.begin(ask))
            await router.heard(ask, "decode.local" if local else "prefill.started")
            await router.cancel(ask)
    await windowed.settled()


@pytest.mark.parametrize("local", [0, ALL], ids=["handed off", "computed at decode"])
async def test_a_tier_is_read_as_far_as_a_prompt_sees(model_dir: Path, windowed_oracle: Oracle, local: int) -> None:
    prompt = prompt_of(100, seed=10)  # six full pages; behind them tokens see three
    with running_pair(model_dir, config={**CONFIG, "cache": {**CONFIG["cache"], "host_bytes": 4 << 20}}) as pair:
        worker = pair.decode if local else pair.prefill
        tiers = worker.parts.tiers
        assert tiers is not None
        async with Router(pair) as router:
            await router.ask(Ask(prompt, params(), local=local))
            await until(lambda: tiers.stores[0].held()[0], "pages in the tier", wanted=lambda num: num >= 6)
            await pair.settled()
            pair.drop_caches()
            tiers._compute_rate = Rate()  # as after a start: on a busy machine it may be either way
            before = worker.parts.counters.num_prompt_tokens_computed
            (outcome,) = await router.ask(Ask(prompt, params(), local=4 if local else 0))
        assert outcome.ids() == windowed_oracle.greedy(prompt, 12)
        assert tiers.counters.num_fetched == 3
        assert worker.parts.counters.num_prompt_tokens_computed == before + 4
        await pair.settled()
