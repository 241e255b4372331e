"""Decode computes a prompt by itself: the tokens are those of a handoff, whatever the journal and whatever happens."""

from __future__ import annotations

import sys
from typing import Any
from unittest import mock

import pytest

from decode_worker.job import Prompt
from tandem.core.sampling import SamplingParams
from tandem.rpc.v1 import common_pb2 as pb
from tandem.worker.prompt_room import PromptRoom
from tests.support.scripted_router import Ask, Outcome, Router
from tests.support.waiting import until
from tests.support.worker_pair import (
    PAGE,
    SHARED_LOOP,
    AnyWorker,
    Gate,
    Oracle,
    WorkerPair,
    counted,
    prompt_of,
)

pytest_plugins = ["tests.support.worker_pair"]
pytestmark = SHARED_LOOP

NUM_NEW = 40
ALL = 512  # more than any prompt has
SAMPLED = SamplingParams(temperature=1.0, seed=7, max_tokens=NUM_NEW, ignore_eos=True)


def greedy(max_tokens: int = NUM_NEW, **fields: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **fields)


# ---- what comes out


async def test_ragged_batches_give_what_transformers_gives(pair: WorkerPair, oracle: Oracle) -> None:
    """Beside handed-off requests, in the same batches."""
    prompts = [prompt_of(length) for length in (1, PAGE - 1, PAGE, PAGE + 1, 50, 100, 200)]
    async with Router(pair) as router:
        asks = [Ask(prompt, local=ALL if n % 2 else 0) for n, prompt in enumerate(prompts)]
        asks += [Ask(prompt_of(90, seed=1), local=ALL)]
        for ask, outcome in zip(asks, await router.ask(*asks), strict=True):
            assert outcome.ids() == oracle.greedy(ask.prompt, 12)
            assert outcome.finished == {0: pb.FINISH_REASON_LENGTH}
            assert (outcome.local is None) == (ask.local == 0)


async def test_prefill_has_no_part_in_it(pair: WorkerPair) -> None:
    async with Router(pair) as router:
        before = pair.prefill.parts.counters.num_prompt_tokens_computed
        with counted(pair, computed=50, cached=0):
            (outcome,) = await router.ask(Ask(prompt_of(50), local=50))
    assert pair.prefill.parts.counters.num_prompt_tokens_computed == before
    assert outcome.kinds == ["decode.local"]
    assert outcome.local is not None
    assert (outcome.local.num_cached_tokens, outcome.local.num_computed_tokens) == (0, 50)
    assert {name for name, _ in outcome.chunks} == {"chunk"}
    assert sum(num_tokens for _, num_tokens in outcome.chunks) == 50


@pytest.mark.parametrize("missing_at_most", [25, 26])
async def test_only_what_the_cache_lacks_counts(pair: WorkerPair, oracle: Oracle, missing_at_most: int) -> None:
    shared = prompt_of(70)
    async with Router(pair) as router:
        await router.ask(Ask(shared, local=ALL))
        await pair.settled()
        ask = Ask(shared + prompt_of(20), local=missing_at_most)  # four of its six pages are cached: 26 tokens are not
        is_local = missing_at_most == 26
        with counted(pair, computed=26 if is_local else 0, cached=64):
            if is_local:
                (outcome,) = await router.ask(ask)
            else:
                await router.begin(ask)
                outcome = await router.finish(ask)
        assert (outcome.grant is None) == is_local
        assert outcome.ids() == oracle.greedy(ask.prompt, 12)


async def test_pages_computed_here_are_found_by_the_next(pair: WorkerPair, oracle: Oracle) -> None:
    """Also by a handoff, which then brings only the rest."""
    prompt = prompt_of(100)
    async with Router(pair) as router:
        await router.ask(Ask(prompt[:80], local=ALL))
        await pair.settled()
        (outcome,) = await router.ask(Ask(prompt))
    assert outcome.grant is not None
    assert outcome.grant.num_cached_pages == 5
    assert outcome.ids() == oracle.greedy(prompt, 12)


JOURNALS: dict[str, dict[int, int | None]] = {  # choice → tokens that the client has; None: the choice has ended
    "none": {},
    "first tokens of some": {0: 1, 2: 1},
    "of one, long": {1: 33},  # replaying it takes pages beyond the prompt's
    "of all": {0: 2, 1: 17, 2: 1},
    "one has ended": {1: None},
    "one has ended, one goes on": {0: 5, 2: None},
    "two have ended": {0: None, 2: None},
    "two have ended, one goes on": {0: None, 1: 9, 2: None},
}


@pytest.mark.parametrize("given", JOURNALS.values(), ids=JOURNALS)
@pytest.mark.parametrize("params", [greedy(), SAMPLED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("length", [50, 2 * PAGE])
async def test_every_journal_is_continued_as_in_an_undisturbed_run(
    pair: WorkerPair, given: dict[int, int | None], params: SamplingParams, length: int
) -> None:
    prompt = prompt_of(length)
    async with Router(pair) as router:
        (whole,) = await router.ask(ask := Ask(prompt, params, n=3))
        await pair.settled()
        pair.drop_caches()
        again = Ask(
            prompt, params, n=3, request_id=ask.request_id, attempt=2, local=ALL, journal=journals(whole, given)
        )
        with counted(pair, computed=length, cached=0):
            (outcome,) = await router.ask(again)
    assert outcome.kinds == ["decode.local"]
    assert sorted(outcome.finished) == [c for c in range(3) if given.get(c, 0) is not None]
    for choice in outcome.finished:
        num_given = given.get(choice) or 0
        assert min(outcome.tokens[choice]) == num_given, "what the client has is not sampled again"
        assert outcome.ids(choice) == whole.ids(choice)[num_given:]


def journals(whole: Outcome, given: dict[int, int | None]) -> tuple[pb.ChoiceJournal, ...]:
    return tuple(
        pb.ChoiceJournal(choice=choice, token_ids=whole.ids(choice)[: 3 if num is None else num], finished=num is None)
        for choice, num in given.items()
    )


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(seed=3, max_tokens=NUM_NEW, presence_penalty=1.5, frequency_penalty=0.5, repetition_penalty=1.3),
        SamplingParams(seed=4, max_tokens=NUM_NEW, top_k=20, top_p=0.9, min_p=0.01, temperature=0.7, ignore_eos=True),
        SamplingParams(seed=5, max_tokens=NUM_NEW, min_tokens=20, logit_bias=((1, 9.0),)),
        SamplingParams(seed=6, max_tokens=NUM_NEW, num_logprobs=3, ignore_eos=True),
    ],
    ids=["penalties", "truncated", "min tokens", "logprobs"],
)
async def test_all_that_shapes_sampling_is_the_same(pair: WorkerPair, params: SamplingParams) -> None:
    prompt = prompt_of(45)
    async with Router(pair) as router:
        (handed,) = await router.ask(Ask(prompt, params, n=2))
        await pair.settled()
        pair.drop_caches()
        (here,) = await router.ask(Ask(prompt, params, n=2, local=ALL))
    assert here.finished == handed.finished
    for choice in range(2):
        assert here.ids(choice) == handed.ids(choice)
        for index, expected in handed.logprobs[choice].items():
            assert here.logprobs[choice][index] == pytest.approx(expected, abs=1e-4)
            assert len(expected) == 1 + max(0, params.num_logprobs)


async def test_choices_may_end_with_their_first_token(pair: WorkerPair) -> None:
    prompt, num = prompt_of(50), 4
    async with Router(pair) as router:
        (plain,) = await router.ask(Ask(prompt, SAMPLED, n=num, local=ALL))
        stop = plain.ids(1)[0]
        ended = {c for c in range(num) if plain.ids(c)[0] == stop}
        assert ended != set(range(num)), "all choices begin alike: choose another seed"
        params = SamplingParams(max_tokens=NUM_NEW, seed=7, ignore_eos=True, stop_token_ids=(stop,))
        (outcome,) = await router.ask(Ask(prompt, params, n=num, local=ALL))
    for choice in range(num):
        expected = plain.ids(choice)
        end = expected.index(stop) + 1 if stop in expected else NUM_NEW
        assert outcome.ids(choice) == expected[:end]
    assert all(outcome.finished[c] == pb.FINISH_REASON_STOP for c in ended)


@pytest.mark.parametrize("length", [1, 40, 511])
async def test_all_choices_may_end_with_their_first_token(pair: WorkerPair, oracle: Oracle, length: int) -> None:
    """511 tokens leave the context room for one."""
    async with Router(pair) as router:
        ask = Ask(prompt_of(length), greedy(1 if length < 511 else 9), n=2, local=ALL)
        (outcome,) = await router.ask(ask)
    assert outcome.ids(0) == outcome.ids(1) == oracle.greedy(ask.prompt, 1)


# ---- what happens meanwhile


@pytest.mark.parametrize(("attempt", "num_steps"), [(1, 3), (2, 2)], ids=["a new prompt", "after a loss"])
async def test_a_new_prompt_takes_what_steps_may_have_and_a_retrys_takes_what_it_needs(
    pair: WorkerPair, oracle: Oracle, attempt: int, num_steps: int
) -> None:
    old, scheduler = pair.limit(pair.decode, paced_tokens=20), pair.decode.parts.scheduler
    learnt, scheduler.prompt_room = scheduler.prompt_room, PromptRoom()
    # Whatever this machine's own steps take, 20 tokens a step are worth it.
    scheduler.prompt_room.note(1, 0, 0.01)
    scheduler.prompt_room.note(0, 32, 0.011)
    try:
        async with Router(pair) as router:
            with Gate(pair.decode.parts.engine, "forward", first=sys.maxsize) as steps:
                ask = Ask(prompt_of(60, seed=40 + attempt), greedy(1), attempt=attempt, local=ALL)
                (outcome,) = await router.ask(ask)
                assert outcome.ids() == oracle.greedy(ask.prompt, 1)
            assert steps.num_calls == num_steps
    finally:
        scheduler.limits, scheduler.prompt_room = old, learnt


async def test_a_long_prompt_is_computed_beside_tokens_in_steps_that_keep_their_time(
    pair: WorkerPair, oracle: Oracle
) -> None:
    """The first step has few of its tokens; then the worker knows what it may take."""
    long = prompt_of(450, seed=77)
    async with Router(pair) as router:
        with Gate(pair.decode.parts.engine, "forward", first=1) as generating:
            elder = await router.begin(Ask(prompt_of(20), greedy(200)))
            await generating.wait()
            younger = await router.reserve(Ask(long, greedy(5), local=ALL))
            generating.open()
            outcome = await router.finish(younger)
        assert outcome.ids() == oracle.greedy(long, 5)
        assert (await router.finish(elder)).ids() == oracle.greedy(prompt_of(20), 200)
    told = pair.decode.parts.read_status().prompt_steps
    assert told.num_tokens > 0


@pytest.mark.parametrize("params", [greedy(60), SamplingParams(max_tokens=60, seed=3, ignore_eos=True)])
async def test_a_prompt_is_preempted_while_it_is_computed(pair: WorkerPair, params: SamplingParams) -> None:
    """An older request takes the pages that it grows into from the prompt, which is then computed again."""
    prompt = prompt_of(400)
    decode = pair.decode
    old = pair.limit(decode, paced_tokens=2)

    def is_computing() -> bool:
        return any(isinstance(s.owner, Prompt) for s in decode.parts.scheduler.running)

    try:
        async with Router(pair) as router:
            (whole,) = await router.ask(Ask(prompt, params, n=2, local=ALL))
            await pair.settled()
            pair.drop_caches()
            with Gate(decode.parts.engine, "forward", first=1) as generating:
                elder = await router.begin(Ask(prompt_of(20), greedy(400)))
                await generating.wait()
                with (
                    Gate(decode.parts.engine, "forward", when=is_computing) as computing,
                    mock.patch.object(decode, "command", wraps=decode.command) as commands,
                ):
                    ask = await router.reserve(Ask(prompt, params, n=2, local=ALL))
                    await until(lambda: any(c.args[1].HasField("reserve") for c in commands.mock_calls), "the command")
                    generating.open()
                    await computing.wait()
                    # The runner stands in a step: nobody else looks at the pool.
                    hogged = decode.parts.pool.allocate(decode.parts.pool.num_available)
                    assert hogged is not None
                    before = decode.parts.counters.num_preemptions
            try:
                await until(lambda: decode.parts.counters.num_preemptions > before, "a preemption")
                assert [type(s.owner) for s in decode.parts.scheduler.waiting] == [Prompt]
            finally:
                pair.on_runner(decode, lambda: decode.parts.pool.release(hogged))
            outcome = await router.finish(ask)
            await router.finish(elder)
    finally:
        decode.parts.scheduler.limits = old
    assert [outcome.ids(c) for c in range(2)] == [whole.ids(c) for c in range(2)]


async def test_pages_are_given_up_only_when_what_was_begun_lies_in_them(
    pair: WorkerPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU a step that gives no token, and one that fails, may still be written when its forward returns."""
    decode, order = pair.decode, []

    def noted(owner: Any, name: str) -> None:
        inner = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args: (order.append(name), inner(*args))[1])

    parts = decode.parts
    for owner, name in ((parts.engine, "finish"), (parts.scheduler, "apply"), (decode.core, "step_failed")):
        noted(owner, name)
    async with Router(pair) as router:
        await router.ask(Ask(prompt_of(40)))
        assert "finish" not in order, "each of its steps gave tokens"
        order.clear()
        await router.ask(Ask(prompt_of(200), local=ALL))
        assert order[:2] == ["finish", "apply"]
        order.clear()
        with monkeypatch.context() as broken:
            broken.setattr(decode.parts.engine, "forward", lambda *_: 1 / 0)
            ask = await router.reserve(Ask(prompt_of(40), local=ALL))
            await router.until(lambda: router.outcomes[ask.key].failures, "the failure")
        assert order == ["finish", "step_failed"]


@pytest.mark.parametrize("params", [greedy(60), SamplingParams(max_tokens=60, seed=11, ignore_eos=True)])
async def test_a_tight_pool_changes_nothing(pair: WorkerPair, params: SamplingParams) -> None:
    """Just large enough for one choice of the longest request: others are preempted, and come back by chunks."""
    asks = [(prompt_of(length), params) for length in (40, 33, 50, 20)]
    async with Router(pair) as router:
        roomy = await router.ask(*(Ask(*ask, n=2, local=ALL) for ask in asks))
        await pair.settled()
        before = pair.decode.parts.counters.num_preemptions
        with pair.hogged(pair.decode, num_free=7):
            tight = await router.ask(*(Ask(*ask, n=2, local=ALL) for ask in asks))
    assert pair.decode.parts.counters.num_preemptions > before
    assert [o.ids(c) for o in tight for c in range(2)] == [o.ids(c) for o in roomy for c in range(2)]


async def test_of_what_waits_for_pages_only_prompts_to_compute_here_are_work(pair: WorkerPair, oracle: Oracle) -> None:
    """As routers hear it: the prompt of a handoff is prefill's work."""
    handed_off, local = Ask(prompt_of(50)), Ask(prompt_of(40), local=ALL)
    async with Router(pair) as router:

        async def shown(num_queued: int, num_tokens: int) -> None:
            def is_shown() -> bool:
                status = router.statuses["decode"]
                return (status.num_queued, status.num_queued_tokens) == (num_queued, num_tokens)

            await router.until(is_shown, f"{num_queued} that wait, with {num_tokens} tokens to compute")

        with pair.hogged(pair.decode, num_free=0):
            await router.begin(handed_off)
            await shown(1, 0)
            await router.reserve(local)
            await shown(2, 40)
        for ask in (handed_off, local):
            assert (await router.finish(ask)).ids() == oracle.greedy(ask.prompt, 12)
        await shown(0, 0)


async def test_a_prompt_that_is_being_computed_is_in_the_figures_that_go_with_the_word(
    pair: WorkerPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From then on the router goes by them alone. Looked at when the word is given: later figures may go with it."""
    figures: dict[str, int] = {}

    def watch(place: Any, worker: AnyWorker) -> None:
        emit = place._emit

        def emit_and_look(*arguments: Any) -> None:
            if any(kind in str(arguments) for kind in ("PromptStarted(", "ComputesHere(")):
                figures[worker.role] = worker.parts.read_status().num_queued_tokens
            emit(*arguments)

        monkeypatch.setattr(place, "_emit", emit_and_look)

    watch(pair.prefill.core, pair.prefill)
    watch(pair.decode.core, pair.decode)
    async with Router(pair) as router:
        await router.finish(await router.begin(Ask(prompt_of(50))))
        await router.finish(await router.reserve(Ask(prompt_of(40), local=ALL)))
    assert figures == {"prefill": 50, "decode": 40}


async def test_what_can_never_fit_is_refused(pair: WorkerPair) -> None:
    async with Router(pair) as router:
        for ask in (Ask(prompt_of(20), n=2, local=ALL, journal=(pb.ChoiceJournal(choice=2, token_ids=[5]),)),
                    Ask([5] * 512, local=ALL), Ask([], local=ALL)):  # fmt: skip
            await router.reserve(ask)
            await router.heard(ask, "decode.failed")
            failure = router.outcomes[ask.key].failures["decode"]
            assert (failure.code, failure.retryable) == ("invalid_request", False)


async def test_a_failed_step_ends_its_requests_and_nothing_else(pair: WorkerPair, oracle: Oracle) -> None:
    engine = pair.decode.parts.engine
    forward = engine.forward

    def failing(*_: Any) -> Any:
        engine.forward = forward  # type: ignore[method-assign]
        raise RuntimeError("out of luck")

    async with Router(pair) as router:
        engine.forward = failing  # type: ignore[assignment, method-assign]
        ask = await router.reserve(Ask(prompt_of(40), local=ALL))
        await router.heard(ask, "decode.failed")
        assert "out of luck" in router.outcomes[ask.key].failures["decode"].message
        await pair.settled()
        (outcome,) = await router.ask(Ask(prompt_of(41), local=ALL))
    assert outcome.ids() == oracle.greedy(prompt_of(41), 12)


async def test_repeated_commands_change_nothing(pair: WorkerPair, oracle: Oracle) -> None:
    async with Router(pair) as router:
        with Gate(pair.decode.parts.engine, "forward", first=1) as gate:
            ask = await router.reserve(Ask(prompt_of(60), local=ALL))
            await gate.wait()
            outcome = router.outcomes[ask.key]
            await router.reserve(ask)
            await router.until(lambda: len(outcome.kinds) == 2, "the repeated answer")
        await router.finish(ask)
        assert outcome.ids() == oracle.greedy(ask.prompt, 12)
        assert outcome.kinds == ["decode.local", "decode.local"], "asked twice, answered twice"
        # Long after the end: an answer, and no second life.
        await router.reserve(ask)
        await router.heard(ask, "decode.failed")
        assert outcome.failures["decode"].reason == "already_ended"


async def test_a_newer_attempt_ends_the_older_one(pair: WorkerPair, oracle: Oracle) -> None:
    async with Router(pair) as router:
        with Gate(pair.decode.parts.engine, "forward", first=1) as gate:
            older = await router.reserve(Ask(prompt_of(60), greedy(200), local=ALL))
            await gate.wait()
            newer = await router.reserve(Ask(older.prompt, request_id=older.request_id, attempt=2, local=ALL))
        assert (await router.finish(newer)).ids() == oracle.greedy(newer.prompt, 12)
        await pair.settled()
        assert not router.outcomes[older.key].finished


@pytest.mark.parametrize("is_local", [True, False], ids=["computed here", "handed off"])
async def test_a_row_that_cannot_be_sampled_fails_its_own_request(
    pair: WorkerPair, oracle: Oracle, is_local: bool
) -> None:
    engine = pair.decode.parts.engine
    forward = engine.forward

    def poisoned(sequences: Any, on_layer: Any = None) -> Any:
        """NaN for whoever is beyond the other requests' end."""
        logits = forward(sequences, on_layer).clone()
        far = [s.end >= 100 for s in sequences if s.num_logits]
        logits[far] = float("nan")
        return logits

    victim = Ask(prompt_of(100), n=2, local=ALL if is_local else 0)
    async with Router(pair) as router:
        engine.forward = poisoned  # type: ignore[method-assign]
        try:
            with Gate(engine, "forward"):
                await (router.reserve(victim) if is_local else router.begin(victim))
                others = [await router.begin(Ask(prompt_of(50))), await router.reserve(Ask(prompt_of(30), local=ALL))]
            await router.heard(victim, "decode.failed")
            for other in others:
                assert (await router.finish(other)).ids() == oracle.greedy(other.prompt, 12)
        finally:
            del engine.forward
        failure = router.outcomes[victim.key].failures["decode"]
        assert (failure.code, "NaN" in failure.message) == ("internal", True)
        assert router.outcomes[victim.key].kinds.count("decode.failed") == 1
        await router.cancel(victim, "prefill")
        await pair.settled()
        again = Ask(victim.prompt, local=ALL)
        with counted(pair, computed=100, cached=0):  # nothing of what led to NaN is in the cache
            (outcome,) = await router.ask(again)
    assert outcome.ids() == oracle.greedy(again.prompt, 12)
