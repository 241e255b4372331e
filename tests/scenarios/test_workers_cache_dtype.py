"""Pages of fewer bits between two workers: where they land, what a tier gives back, and who computes on from them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from decode_worker.worker import DecodeWorker
from tandem.core.tiers import Rate
from tandem.engine.engine import Engine, SequenceInput
from tandem.rpc.v1 import common_pb2 as pb
from tests.support.scripted_router import Ask, Router
from tests.support.waiting import until
from tests.support.worker_pair import CONFIG, PAGE, SHARED_LOOP, WorkerPair, make_worker, prompt_of, running_pair

pytest_plugins = ["tests.support.worker_pair"]
pytestmark = SHARED_LOOP

NUM_NEW = 12
NUM_PAGES = 6
LENGTH = NUM_PAGES * PAGE + 4


@pytest.fixture(scope="module", params=["bfloat16", "int8"])
def dtype(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture(scope="module")
def config(dtype: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    tier = {"disk_path": str(tmp_path_factory.mktemp("pages"))}
    return {**CONFIG, "cache": {**CONFIG["cache"], **tier, "dtype": dtype}}


@pytest.fixture(scope="module")
def small(worker_model_dir: Path, config: dict[str, Any]) -> Iterator[WorkerPair]:
    with running_pair(worker_model_dir, config=config) as pair:
        yield pair


@pytest.fixture(scope="module")
def engine(worker_model_dir: Path, dtype: str) -> Engine:
    return Engine.load(worker_model_dir, page_size=PAGE, num_pages=16, num_threads=1, cache_dtype=dtype, probe=False)


def greedy(engine: Engine, prompt: Sequence[int], num_new: int = NUM_NEW) -> list[int]:
    """Of one engine alone: the prompt in one piece, then token by token."""
    tokens, start = list(prompt), 0
    found: list[int] = []
    while len(found) < num_new:
        logits = engine.forward([SequenceInput(tokens, start, range(engine.num_pages), 1)])
        start, tokens = start + len(tokens), [int(logits[0].argmax())]
        found += tokens
    return found


async def test_a_handoff_gives_what_one_engine_gives(small: WorkerPair, engine: Engine) -> None:
    """Chunks of 32 here, the whole there; prefill's pages are decode's, byte by byte."""
    asks = [Ask(prompt_of(length)) for length in (40, PAGE, 100, 7)]
    async with Router(small) as router:
        outcomes = await router.ask(*asks)
    for ask, outcome in zip(asks, outcomes, strict=True):
        assert outcome.done is not None
        assert outcome.ids() == greedy(engine, ask.prompt), ask
    await small.settled()
    held = small.decode.parts.engine.layout
    assert held.dtype == engine.layout.dtype
    transferred = sum(-(-len(ask.prompt) // PAGE) for ask in asks) * held.page_bytes
    assert small.prefill.parts.counters.num_transfer_bytes == transferred


async def test_pages_come_back_from_disk_as_they_were(small: WorkerPair, engine: Engine) -> None:
    prompt, worker = prompt_of(LENGTH, seed=1), small.prefill
    tiers = worker.parts.tiers
    assert tiers is not None
    (store,) = tiers.stores
    async with Router(small) as router:
        before = store.held()[0]
        (first,) = await router.ask(Ask(prompt))
        await until(lambda: store.held()[0], "pages on disk", wanted=lambda num: num >= before + NUM_PAGES)
        await small.settled()
        small.drop_caches()
        tiers._compute_rate = Rate()  # as after a start: on a busy machine it may be either way
        fetched = tiers.counters.num_fetched
        (again,) = await router.ask(Ask(prompt))
    assert tiers.counters.num_fetched - fetched == NUM_PAGES
    assert again.ids() == first.ids() == greedy(engine, prompt)
    await small.settled()


async def test_another_decode_worker_goes_on_with_the_same_tokens(
    small: WorkerPair, engine: Engine, worker_model_dir: Path, config: dict[str, Any]
) -> None:
    """As after the death of the first: the journal is replayed over pages that prefill sends once more."""
    prompt = prompt_of(50, seed=2)
    second = make_worker(DecodeWorker, worker_model_dir, 64, config, name="decode-1")
    second.start()
    try:
        other = WorkerPair(small.prefill_process, second)
        async with Router(small) as router, Router(other) as elsewhere:
            (whole,) = await router.ask(ask := Ask(prompt))
            given = (pb.ChoiceJournal(choice=0, token_ids=whole.ids()[:5]),)
            again = Ask(prompt, request_id=ask.request_id, attempt=2, journal=given)
            (outcome,) = await elsewhere.ask(again)
        assert whole.ids() == greedy(engine, prompt)
        assert outcome.ids() == whole.ids()[5:]
        await small.settled()
    finally:
        second.stop()


async def test_decode_that_computes_the_prompt_itself_says_the_same(small: WorkerPair, engine: Engine) -> None:
    """As the mixed pool does, and after the loss of the prefill worker."""
    prompt = prompt_of(70, seed=3)
    async with Router(small) as router:
        (outcome,) = await router.ask(Ask(prompt, local=512))
    assert outcome.local is not None
    assert outcome.ids() == greedy(engine, prompt)
    await small.settled()
