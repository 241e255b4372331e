"""Decode is lost after it took a request: prefill still has the pages, and hands them off again without computing."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch

from decode_worker.worker import DecodeWorker
from kvtransfer.protocol.messages import AttemptKey
from kvtransfer.protocol.sender_events import ConfirmIdle
from tandem.core.pages import page_keys
from tandem.core.sampling import SamplingParams
from tandem.engine.batch import SequenceInput
from tandem.rpc.v1 import common_pb2 as pb
from tandem.rpc.v1 import prefill_pb2
from tandem.worker.process import WorkerProcess
from tests.support.scripted_router import Ask, Outcome, Router
from tests.support.waiting import until
from tests.support.worker_pair import (
    CONFIG,
    PAGE,
    SHARED_LOOP,
    WAIT_S,
    Oracle,
    Stash,
    WorkerPair,
    make_worker,
    prompt_of,
)

pytest_plugins = ["tests.support.worker_pair"]
pytestmark = SHARED_LOOP

SEEDED = SamplingParams(temperature=0.9, seed=11, max_tokens=12, ignore_eos=True, num_logprobs=2)


@pytest.fixture(scope="module")
def second_decode(worker_model_dir: Path) -> Iterator[WorkerProcess[DecodeWorker]]:
    worker = make_worker(DecodeWorker, worker_model_dir, 128, CONFIG, "decode-1")
    try:
        worker.start()
        yield worker
    finally:
        worker.stop()


@asynccontextmanager
async def two_routers(pair: WorkerPair, decode: WorkerProcess[DecodeWorker]) -> AsyncIterator[tuple[Router, Router]]:
    """Sessions of one prefill worker with the pair's decode worker and with another one."""
    other = WorkerPair(pair.prefill_process, decode)
    pair.on_runner(decode.worker, decode.parts.pool.drop_cache)
    async with Router(pair) as first, Router(other, "s") as second:
        yield first, second
    await other.settled()


def next_attempt(ask: Ask, journal: dict[int, list[int]] | None = None) -> Ask:
    """The same request, tried again; its client has what `journal` says."""
    entries = tuple(pb.ChoiceJournal(choice=choice, token_ids=ids) for choice, ids in (journal or {}).items())
    return dataclasses.replace(ask, attempt=ask.attempt + 1, journal=entries)


async def handed_off(router: Router, ask: Ask) -> Outcome:
    outcome = await router.finish(ask)
    await router.heard(ask, "prefill.handoff_done")
    return outcome


def num_computed(pair: WorkerPair) -> int:
    return pair.prefill.parts.counters.num_prompt_tokens_computed


def num_held(pair: WorkerPair) -> int:
    return pair.on_runner(pair.prefill, pair.prefill.num_held)


def num_private_pages(pair: WorkerPair) -> int:
    """Pages that only their own requests can find, in use or evictable."""

    def count() -> int:
        pool, kept = pair.prefill.parts.pool, pair.prefill.core.retained
        return sum(pool.match([key]) for k in kept._by_request.values() for key in k.private_keys)

    return pair.on_runner(pair.prefill, count)


@pytest.mark.parametrize("length", [PAGE - 5, 5 * PAGE, 5 * PAGE + 3])
@pytest.mark.parametrize("n", [1, 3])
async def test_another_decode_gets_the_pages_and_nothing_is_computed(
    pair: WorkerPair, second_decode: WorkerProcess[DecodeWorker], length: int, n: int
) -> None:
    """Lost before the client had anything: the first tokens are given out again, the same with their logprobs."""
    async with two_routers(pair, second_decode) as (first, second):
        ask = Ask(prompt_of(length, seed=n), SEEDED, n=n)
        before = num_computed(pair)
        (lost,) = await first.ask(ask)
        await first.heard(ask, "prefill.handoff_done")
        assert num_computed(pair) == before + length
        again = await second.begin(next_attempt(ask))
        outcome = await handed_off(second, again)
        assert num_computed(pair) == before + length, "no token of the prompt is computed twice"
        assert outcome.done is not None
        assert (outcome.done.num_computed_tokens, outcome.done.num_cached_tokens) == (0, length)
        for choice in range(n):
            assert outcome.ids(choice) == lost.ids(choice)
            assert outcome.logprobs[choice][0] == lost.logprobs[choice][0]


async def test_choices_that_the_client_has_are_not_given_out_again(
    pair: WorkerPair, second_decode: WorkerProcess[DecodeWorker]
) -> None:
    async with two_routers(pair, second_decode) as (first, second):
        ask = Ask(prompt_of(40), SEEDED, n=2)
        (lost,) = await first.ask(ask)
        await first.heard(ask, "prefill.handoff_done")
        again = await second.begin(next_attempt(ask, {0: lost.ids(0)[:5]}))
        outcome = await handed_off(second, again)
        assert outcome.ids(0) == lost.ids(0)[5:]
        assert outcome.ids(1) == lost.ids(1)
        assert outcome.done is not None
        assert outcome.done.num_computed_tokens == 0


async def test_started_says_what_was_found(pair: WorkerPair, second_decode: WorkerProcess[DecodeWorker]) -> None:
    async with two_routers(pair, second_decode) as (first, second):
        found: list[int] = []
        hear = second._hear

        async def listen(side: str, event: prefill_pb2.PrefillEvent) -> None:
            if side == "prefill" and event.HasField("started"):
                found.append(event.started.num_cached_tokens)
            await hear(side, event)

        second._hear = listen  # type: ignore[method-assign]
        ask = Ask(prompt_of(40))
        await first.ask(ask)
        await first.heard(ask, "prefill.handoff_done")
        await handed_off(second, await second.begin(next_attempt(ask)))
        await second.ask(Ask([*ask.prompt[: 2 * PAGE], 5, 6, 7]))
        assert found == [40, 2 * PAGE]


async def test_what_was_evicted_is_computed_and_the_tokens_stay(
    pair: WorkerPair, second_decode: WorkerProcess[DecodeWorker]
) -> None:
    """The last pages went first: what is left of the prompt's beginning serves."""
    async with two_routers(pair, second_decode) as (first, second):
        ask = Ask(prompt_of(6 * PAGE + 3), SEEDED)
        (lost,) = await first.ask(ask)
        await first.heard(ask, "prefill.handoff_done")
        await until(lambda: not pair.prefill.core.jobs, "the end of the handoff")
        pool = pair.prefill.parts.pool

        def need_memory() -> None:
            """Evict three pages."""
            pages = pool.allocate(pool.counts().free + 3)
            assert pages is not None
            pool.release(pages)

        pair.on_runner(pair.prefill, need_memory)
        outcome = await handed_off(second, await second.begin(next_attempt(ask)))
        assert outcome.ids() == lost.ids()
        assert outcome.done is not None
        assert (outcome.done.num_cached_tokens, outcome.done.num_computed_tokens) == (4 * PAGE, 2 * PAGE + 3)
        spans = {name: [s for s in outcome.done.spans if s.name == name] for name in ("chunk", "transfer", "commit")}
        assert sum(span.count for span in spans["chunk"]) == outcome.done.num_computed_tokens
        assert sum(span.count for span in spans["transfer"]) == outcome.done.num_bytes
        (commit,) = spans["commit"]
        assert commit.begin_s > 0, "in seconds before the message"
        assert all(span.begin_s >= span.end_s >= 0 for span in outcome.done.spans)


async def test_kept_without_a_prefix_cache(pair: WorkerPair, second_decode: WorkerProcess[DecodeWorker]) -> None:
    """Then every page is private: found by the same request only."""
    scheduler, kept = pair.prefill.parts.scheduler, pair.prefill.core.retained
    scheduler.prefix_cache, kept._shares = False, False
    try:
        async with two_routers(pair, second_decode) as (first, second):
            ask = Ask(prompt_of(5 * PAGE + 3))
            (lost,) = await first.ask(ask)
            await first.heard(ask, "prefill.handoff_done")
            (other,) = await first.ask(Ask(ask.prompt))
            assert other.ids() == lost.ids()
            await until(lambda: other.done is not None, "the other request's handoff")
            assert other.done is not None
            assert other.done.num_cached_tokens == 0
            outcome = await handed_off(second, await second.begin(next_attempt(ask)))
            assert outcome.ids() == lost.ids()
            assert outcome.done is not None
            assert outcome.done.num_computed_tokens == 0
            assert num_private_pages(pair) == 12
            await first.say("prefill", release=prefill_pb2.Release(request_id=ask.request_id))
            await until(lambda: num_private_pages(pair) == 6, "the release")
    finally:
        scheduler.prefix_cache, kept._shares = True, True


async def test_release_and_the_end_of_the_router_leave_nothing_private(pair: WorkerPair) -> None:
    kept = pair.prefill.core.retained
    async with Router(pair) as router:
        asks = [Ask(prompt_of(40, seed=n)) for n in range(2)]
        await router.ask(*asks)
        await until(lambda: num_private_pages(pair) == 2, "two partial pages")
        await until(lambda: not pair.prefill.core.jobs, "the end of the handoffs")
        num_free = pair.prefill.parts.pool.counts().free
        await router.say("prefill", release=prefill_pb2.Release(request_id=asks[0].request_id))
        await until(lambda: pair.prefill.parts.pool.counts().free == num_free + 1, "the partial page")
        assert num_private_pages(pair) == 1
    await until(lambda: not len(kept), "the end of the session")
    assert pair.prefill.parts.pool.counts().free == num_free + 2
    assert pair.prefill.parts.pool.counts().cached == 4, "full pages serve others still"


async def test_another_request_of_the_same_id_gets_nothing_of_it(pair: WorkerPair, oracle: Oracle) -> None:
    async with Router(pair) as router:
        ask = Ask(prompt_of(40))
        await router.ask(ask)
        await router.heard(ask, "prefill.handoff_done")
        namesake = Ask([*ask.prompt[:-1], ask.prompt[-1] ^ 1], request_id=ask.request_id, attempt=2)
        (outcome,) = await router.ask(namesake)
        assert outcome.ids() == oracle.greedy(namesake.prompt, 12)
        await router.heard(namesake, "prefill.handoff_done")
        assert outcome.done is not None
        assert outcome.done.num_computed_tokens == 40 - 2 * PAGE


async def test_decode_is_lost_in_the_middle_of_the_handoff(
    pair: WorkerPair, second_decode: WorkerProcess[DecodeWorker], oracle: Oracle
) -> None:
    """Computed and never acknowledged: the pages serve the next attempt all the same."""
    async with two_routers(pair, second_decode) as (first, second):
        with pair.hogged(pair.decode, num_free=2):
            ask = await first.begin(Ask(prompt_of(60)))
            await until(lambda: pair.prefill.parts.scheduler.parked, "a computed prompt")
            again = await second.begin(next_attempt(ask))
            outcome = await handed_off(second, again)
            await first.cancel(ask)
        assert outcome.ids() == oracle.greedy(ask.prompt, 12)
        assert outcome.done is not None
        assert outcome.done.num_computed_tokens == 0


async def test_one_request_whose_logits_are_not_numbers_fails_alone(pair: WorkerPair, oracle: Oracle) -> None:
    """Two prompts in one step: the other one does not notice, and nobody finds the pages of the bad one."""
    inner = pair.prefill.parts.engine.forward
    bad = prompt_of(40, seed=9)

    steps: list[int] = []

    def forward(sequences: Sequence[SequenceInput], on_layer: Callable[[int], None] | None = None) -> torch.Tensor:
        logits = inner(sequences, on_layer).clone()
        steps.append(len(sequences))
        row = 0
        for one in sequences:
            if one.num_logits and list(one.token_ids)[-1] == bad[-1] and one.start + len(one.token_ids) == len(bad):
                logits[row] = float("nan")
            row += one.num_logits
        return logits

    old = pair.limit(pair.prefill, max_num_seqs=0)
    pair.prefill.parts.engine.forward = forward  # type: ignore[method-assign]
    try:
        async with Router(pair) as router:
            good = Ask(prompt_of(50))
            worse = await router.begin(Ask(bad))
            await router.begin(good)
            await until(lambda: len(pair.prefill.parts.scheduler.waiting) == 2, "both prompts")
            pair.limit(pair.prefill, max_num_seqs=2, chunk_size=64, saturating_tokens=128)
            pair.on_runner(pair.prefill, lambda: None)
            await router.until(lambda: "prefill" in router.outcomes[worse.key].failures, "the bad one's failure")
            assert steps[0] == 2
            error = router.outcomes[worse.key].failures["prefill"]
            assert (error.code, error.retryable) == ("internal", False)
            assert "NaN" in error.message
            await router.cancel(worse, "decode")
            assert (await router.finish(good)).ids() == oracle.greedy(good.prompt, 12)
    finally:
        del pair.prefill.parts.engine.forward
        pair.prefill.parts.scheduler.limits = old
    await pair.settled()
    scheduler = pair.prefill.parts.scheduler
    for ids, num in ((good.prompt, 3), (bad, 0)):
        found = scheduler.pool.acquire(page_keys(ids, scheduler.pool.page_size, scheduler.salt))
        scheduler.pool.release(found)
        assert len(found) == num, "of the good one only"


async def test_a_drain_does_not_wait_for_a_decode_worker_that_is_gone(pair: WorkerPair) -> None:
    """A prompt waits for its grant when word comes that decode's process has ended, on some other host."""
    prefill = pair.prefill
    async with Router(pair) as router:
        with pair.hogged(pair.decode, num_free=2):
            ask = await router.begin(Ask(prompt_of(80)))
            await until(lambda: prefill.parts.scheduler.parked, "a computed prompt")
            prefill.parts.life.draining = True
            try:
                refused = await router.start(Ask(prompt_of(20)))
                await router.until(lambda: "prefill" in router.outcomes[refused.key].failures, "the refusal")
                assert router.outcomes[refused.key].failures["prefill"].code == "draining"
                assert num_held(pair) == 1
                prefill._targets[ask.key] = pb.WorkerInfo(incarnation="elsewhere")
                prefill.parts.loop.call_soon_threadsafe(prefill.process_ended, "elsewhere")
                await router.until(lambda: "prefill" in router.outcomes[ask.key].failures, "the failure")
                error = router.outcomes[ask.key].failures["prefill"]
                assert (error.code, error.reason, error.retryable) == ("handoff", "receiver_exited", True)
                await until(lambda: not num_held(pair), "the end of the drain")
            finally:
                prefill.parts.life.draining = False
                await router.cancel(ask, "decode")


async def test_a_drain_does_not_wait_for_a_write_that_nobody_wants(pair: WorkerPair) -> None:
    """Cancelled, with a write under way that does not end: its pages stay in quarantine, and the worker may go."""
    async with Router(pair) as router:
        with Stash(pair.prefill.driver, "_write") as stash:
            ask = await router.begin(Ask(prompt_of(30)))
            await stash.wait()
            assert num_held(pair) == 1
            await router.cancel(ask, "prefill")
            await until(lambda: not num_held(pair), "the end of the drain")
            assert pair.prefill.driver.num_handoffs == 1
            pool = pair.prefill.parts.pool
            await until(lambda: pair.on_runner(pair.prefill, pool.counts).quarantined == 2, "two pages in quarantine")
        await router.cancel(ask, "decode")
        await pair.settled()


async def test_what_a_decode_worker_never_hears_holds_a_drain_for_a_bounded_time(pair: WorkerPair) -> None:
    """Decode answers nothing any more, so it cannot be told that a writer is idle."""
    prefill, peers = pair.prefill, pair.prefill.peers
    old = peers._confirm_for_s, peers._timeout_s
    asked = asyncio.Event()
    here = asyncio.get_running_loop()

    def silent(_: object) -> Future[None]:
        here.call_soon_threadsafe(asked.set)
        return Future()

    async with Router(pair) as router:
        ask = Ask(prompt_of(30))
        await router.ask(ask)
        await router.heard(ask, "prefill.handoff_done")
        await until(lambda: not num_held(pair), "the end of the handoff")
        peers._confirm_for_s = peers._timeout_s = 0.3
        pair.decode.ask_driver = silent  # type: ignore[method-assign, assignment]
        try:
            receiver = pair.decode.parts.incarnation
            prefill.confirm_idle(ConfirmIdle(AttemptKey("nobody", 1), f"{receiver}/0", receiver, b""))
            await asyncio.wait_for(asked.wait(), WAIT_S)
            assert num_held(pair) == 1
            await until(lambda: not num_held(pair), "the end of the confirmation", 5)
        finally:
            del pair.decode.ask_driver
            peers._confirm_for_s, peers._timeout_s = old
