"""Two workers, one handoff between them: the tokens are transformers' own, whatever happens on the way."""

from __future__ import annotations

from typing import Any

import pytest

from tandem.core.sampling import SamplingParams
from tandem.rpc.v1 import common_pb2 as pb
from tests.support.scripted_router import Ask, Router
from tests.support.worker_pair import PAGE, SHARED_LOOP, Gate, Oracle, WorkerPair, prompt_of

pytest_plugins = ["tests.support.worker_pair"]
pytestmark = SHARED_LOOP

NUM_NEW = 12
SAMPLED = SamplingParams(temperature=1.0, seed=7, max_tokens=NUM_NEW, ignore_eos=True)


def greedy(max_tokens: int = NUM_NEW, **fields: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **fields)


def journal(choice: int, ids: list[int] | None = None, *, finished: bool = False) -> pb.ChoiceJournal:
    return pb.ChoiceJournal(choice=choice, token_ids=ids or [], finished=finished)


async def test_ragged_batches_give_what_transformers_gives(pair: WorkerPair, oracle: Oracle) -> None:
    prompts = [prompt_of(length) for length in (1, PAGE - 1, PAGE, PAGE + 1, 50, 100, 200)]
    async with Router(pair) as router:
        outcomes = await router.ask(*(Ask(prompt) for prompt in prompts))
        for prompt, outcome in zip(prompts, outcomes, strict=True):
            assert outcome.ids() == oracle.greedy(prompt, NUM_NEW)
            assert outcome.finished == {0: pb.FINISH_REASON_LENGTH}
            await router.until(lambda o=outcome: o.done, "the handoff")  # type: ignore[misc]
            assert outcome.done is not None
            assert outcome.done.num_computed_tokens == len(prompt)
            assert outcome.done.num_extents == 3 * -(-len(prompt) // PAGE)


@pytest.mark.parametrize("chunk", [PAGE, 3 * PAGE, 8 * PAGE])
async def test_the_size_of_chunks_does_not_show(pair: WorkerPair, oracle: Oracle, chunk: int) -> None:
    prompts = [prompt_of(123, seed=chunk), prompt_of(77, seed=chunk)]
    old = pair.limit(pair.prefill, chunk_size=chunk)
    try:
        async with Router(pair) as router:
            outcomes = await router.ask(*(Ask(prompt) for prompt in prompts))
    finally:
        pair.prefill.parts.scheduler.limits = old
    assert [o.ids() for o in outcomes] == [oracle.greedy(p, NUM_NEW) for p in prompts]


@pytest.mark.parametrize("warm", ["prefill", "decode", "both"])
async def test_prefix_caches_save_work_and_change_nothing(pair: WorkerPair, oracle: Oracle, warm: str) -> None:
    shared = prompt_of(70)
    prompts = [shared + prompt_of(20, seed=1), shared + prompt_of(31, seed=2)]
    async with Router(pair) as router:
        await router.ask(Ask(prompts[0]))
        await pair.settled()
        for side, worker in (("prefill", pair.decode), ("decode", pair.prefill)):
            if warm == side:
                pair.on_runner(worker, worker.parts.pool.drop_cache)
        (outcome,) = await router.ask(ask := Ask(prompts[1]))
        await router.heard(ask, "prefill.handoff_done")
    assert outcome.ids() == oracle.greedy(prompts[1], NUM_NEW)
    assert outcome.grant is not None
    assert outcome.done is not None
    assert outcome.done.num_cached_tokens == (0 if warm == "decode" else 64)
    assert outcome.grant.num_cached_pages == (0 if warm == "prefill" else 4)
    assert outcome.done.num_extents == 3 * (7 - outcome.grant.num_cached_pages)


async def test_choices_share_their_prompt_and_equal_separate_runs(pair: WorkerPair) -> None:
    """50 tokens end inside a page: each choice but the last copies it before it writes."""
    prompt, num = prompt_of(50), 4
    async with Router(pair) as router:
        (together,) = await router.ask(Ask(prompt, SAMPLED, n=num))
        assert len({tuple(together.ids(c)) for c in range(num)}) > 1
        for choice in range(num):
            others = tuple(journal(c, finished=True) for c in range(num) if c != choice)
            (alone,) = await router.ask(Ask(prompt, SAMPLED, n=num, journal=others))
            assert list(alone.finished) == [choice]
            assert alone.ids(choice) == together.ids(choice)


@pytest.mark.parametrize("params", [greedy(60), SamplingParams(max_tokens=60, seed=3, ignore_eos=True)])
async def test_a_tight_pool_preempts_and_changes_nothing(pair: WorkerPair, params: SamplingParams) -> None:
    asks = [(prompt_of(length), params) for length in (40, 33, 50, 20)]
    victims: list[bool] = []
    scheduler = pair.decode.parts.scheduler
    preempt = scheduler._preempt

    def watched(batch: Any, sequence: Any) -> None:
        victims.append(sequence is min(scheduler.running, key=lambda s: s.order))
        preempt(batch, sequence)

    async with Router(pair) as router:
        roomy = await router.ask(*(Ask(*ask) for ask in asks))
        await pair.settled()
        before = pair.decode.parts.counters.num_preemptions
        scheduler._preempt = watched  # type: ignore[method-assign]
        try:
            with pair.hogged(pair.decode, num_free=14):
                tight = await router.ask(*(Ask(*ask) for ask in asks))
                assert router.outcomes
        finally:
            scheduler._preempt = preempt  # type: ignore[method-assign]
    assert pair.decode.parts.counters.num_preemptions > before
    assert victims
    assert not any(victims), "the oldest was preempted"
    assert [o.ids() for o in tight] == [o.ids() for o in roomy]


@pytest.mark.parametrize("params", [greedy(40), SamplingParams(max_tokens=40, seed=5, ignore_eos=True)])
@pytest.mark.parametrize("num_given", [1, 2, 33])
async def test_a_retry_continues_its_journal(pair: WorkerPair, params: SamplingParams, num_given: int) -> None:
    """33 tokens of replay need pages that the handoff did not bring."""
    prompt = prompt_of(10)
    async with Router(pair) as router:
        (first,) = await router.ask(ask := Ask(prompt, params, n=3))
        given = (journal(0, first.ids(0)[:num_given]), journal(2, first.ids(2)[:3], finished=True))
        again = Ask(prompt, params, n=3, request_id=ask.request_id, attempt=2, journal=given)
        (second,) = await router.ask(again)
    assert sorted(second.finished) == [0, 1]
    assert min(second.tokens[0]) == num_given, "what the client has is not sampled again"
    assert second.ids(0) == first.ids(0)[num_given:]
    assert second.ids(1) == first.ids(1)


async def test_a_journal_that_has_ended_leaves_nothing_to_do(pair: WorkerPair) -> None:
    """Whether or not the router says so: by the request's own rules nothing may follow."""
    async with Router(pair) as router:
        ask = await router.begin(Ask(prompt_of(20), greedy(3), journal=(journal(0, [5, 6, 7]),)))
        await router.heard(ask, "prefill.ended")
        assert not router.outcomes[ask.key].tokens
        await router.cancel(ask, "decode")


@pytest.mark.parametrize("length", [1, 40, 511])
async def test_a_request_may_end_with_its_first_token(pair: WorkerPair, oracle: Oracle, length: int) -> None:
    """511 tokens leave the context room for one."""
    params = greedy(1 if length < 511 else 9)
    async with Router(pair) as router:
        ask = await router.begin(Ask(prompt_of(length), params))
        outcome = await router.finish(ask)
        await router.heard(ask, "prefill.ended")
        assert outcome.ids() == oracle.greedy(ask.prompt, 1)
        await router.cancel(ask, "decode")
        await pair.settled()
        assert not outcome.failures


async def test_some_choices_end_with_their_first_token(pair: WorkerPair) -> None:
    prompt, num = prompt_of(50), 4
    async with Router(pair) as router:
        (plain,) = await router.ask(Ask(prompt, SAMPLED, n=num))
        stop = plain.ids(1)[0]
        ended = {c for c in range(num) if plain.ids(c)[0] == stop}
        assert ended != set(range(num)), "all choices begin alike: choose another seed"
        params = SamplingParams(max_tokens=NUM_NEW, seed=7, ignore_eos=True, stop_token_ids=(stop,))
        (outcome,) = await router.ask(Ask(prompt, params, n=num))
    for choice in range(num):
        expected = plain.ids(choice)
        end = expected.index(stop) + 1 if stop in expected else NUM_NEW
        assert outcome.ids(choice) == expected[:end]
    assert all(outcome.finished[c] == pb.FINISH_REASON_STOP for c in ended)


async def test_a_grant_may_come_before_prefill_has_looked_at_the_prompt(pair: WorkerPair, oracle: Oracle) -> None:
    """The runner is in a long step: the grant is attached before the prompt is taken in."""
    async with Router(pair) as router:
        with Gate(pair.prefill.parts.engine, "forward") as gate:
            busy = await router.begin(Ask(prompt_of(30)))
            await gate.wait()
            ask = await router.begin(Ask(prompt_of(60)))
            await router.heard(ask, "decode.granted")
            await router.until_attached(ask)
            gate.open()
            outcome = await router.finish(ask)
            await router.finish(busy)
    assert outcome.ids() == oracle.greedy(ask.prompt, NUM_NEW)


async def test_repeated_commands_change_nothing(pair: WorkerPair, oracle: Oracle) -> None:
    async with Router(pair) as router:
        with Gate(pair.prefill.parts.engine, "forward", first=1) as gate:
            ask = await router.begin(Ask(prompt_of(60)))
            await gate.wait()
            await router.begin(ask)
            await router.until_attached(ask)
            await router.attach(ask)
            await router.begin(ask)
            gate.open()
            outcome = await router.finish(ask)
        assert outcome.ids() == oracle.greedy(ask.prompt, NUM_NEW)
        await router.heard(ask, "prefill.handoff_done", "decode.admitted")
        await pair.settled()
        # Long after the end: an answer, and no second life.
        await router.begin(ask)
        await router.heard(ask, "prefill.failed", "decode.failed")
        assert {f.reason for f in outcome.failures.values()} == {"already_ended"}


async def test_a_cancelled_attempt_that_was_granted_answers_a_late_reserve(pair: WorkerPair) -> None:
    async with Router(pair) as router:
        router.attaches = False
        ask = await router.reserve(Ask(prompt_of(20)))
        await router.heard(ask, "decode.granted")
        await router.cancel(ask, "decode")
        await router.reserve(ask)
        await router.heard(ask, "decode.failed")


async def test_a_newer_attempt_ends_the_older_one(pair: WorkerPair) -> None:
    async with Router(pair) as router:
        with Gate(pair.decode.parts.engine, "forward", first=2) as gate:
            old = await router.begin(Ask(prompt_of(20), greedy(200)))
            await gate.wait()
            new = Ask(old.prompt, greedy(5), request_id=old.request_id, attempt=2)
            await router.begin(new)
            await router.heard(new, "decode.granted")  # beside the step that is held
            gate.open()
            await router.finish(new)
        await pair.settled()
        assert len(router.outcomes[old.key].ids()) < 20


async def test_decode_lets_in_as_many_sequences_as_it_may_run(pair: WorkerPair) -> None:
    sizes: list[int] = []
    forward = pair.decode.parts.engine.forward

    def watched(sequences: Any, on_layer: Any = None) -> Any:
        sizes.append(len(sequences))
        return forward(sequences, on_layer)

    old = pair.limit(pair.decode, max_num_seqs=2)
    pair.decode.parts.engine.forward = watched  # type: ignore[method-assign]
    try:
        async with Router(pair) as router:
            await router.ask(*(Ask(prompt_of(20, seed=n)) for n in range(5)))
    finally:
        del pair.decode.parts.engine.forward
        pair.decode.parts.scheduler.limits = old
    assert max(sizes) <= 2


@pytest.mark.parametrize("prompt", [[], [5] * 512, [5, 320], [5] * 4000])
async def test_a_prompt_that_cannot_be_computed_is_refused_by_both(pair: WorkerPair, prompt: list[int]) -> None:
    async with Router(pair) as router:
        ask = await router.begin(Ask(prompt))
        await router.heard(ask, "prefill.failed", "decode.failed")
        failures = router.outcomes[ask.key].failures
        assert {f.code for f in failures.values()} == {"invalid_request"}
        await router.ask(Ask(prompt_of(5)))


async def test_a_full_queue_says_so(pair: WorkerPair) -> None:
    old = pair.limit(pair.prefill, max_num_seqs=0, queue_bound=1)
    reservations = pair.decode.core.ledger
    bound, reservations._bound = reservations._bound, 1
    try:
        async with Router(pair) as router:
            with pair.hogged(pair.decode, num_free=0):
                asks = [await router.begin(Ask(prompt_of(20, seed=n))) for n in range(2)]
                await router.heard(asks[1], "prefill.failed", "decode.failed")
                assert {f.code for f in router.outcomes[asks[1].key].failures.values()} == {"overloaded"}
                pair.prefill.parts.scheduler.limits = old
                pair.on_runner(pair.prefill, lambda: None)
            await router.finish(asks[0])
    finally:
        pair.prefill.parts.scheduler.limits = old
        reservations._bound = bound


async def test_a_failed_step_ends_its_requests_and_nothing_else(pair: WorkerPair, oracle: Oracle) -> None:
    for worker, side in ((pair.prefill, "prefill"), (pair.decode, "decode")):
        forward = worker.parts.engine.forward

        def failing(*_: Any, worker: Any = worker, forward: Any = forward) -> Any:
            worker.parts.engine.forward = forward
            raise RuntimeError("out of luck")

        async with Router(pair) as router:
            worker.parts.engine.forward = failing  # type: ignore[method-assign]
            ask = await router.begin(Ask(prompt_of(40)))
            await router.heard(ask, f"{side}.failed")
            assert "out of luck" in router.outcomes[ask.key].failures[side].message
            await router.cancel(ask)
            await pair.settled()
            (outcome,) = await router.ask(Ask(prompt_of(41)))
            assert outcome.ids() == oracle.greedy(prompt_of(41), NUM_NEW)
