"""Log-probabilities of prompts are transformers' own, whoever computes the prompt and whatever is cached."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tandem.core.sampling import SamplingParams
from tandem.rpc.v1 import common_pb2 as pb
from tests.support.scripted_router import Ask, Outcome, Router
from tests.support.worker_pair import PAGE, SHARED_LOOP, Gate, Oracle, WorkerPair, prompt_of

pytest_plugins = ["tests.support.worker_pair"]
pytestmark = SHARED_LOOP

NUM_TOP = 3
ALL = 512  # more than any prompt has


def greedy(max_tokens: int = 4) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


def asked(prompt: list[int], **fields: Any) -> Ask:
    return Ask(prompt, **{"params": greedy(), "num_top": NUM_TOP, **fields})


def check(outcome: Outcome, prompt: list[int], oracle: Oracle, *, side: str, first: int = 1) -> None:
    """Each token from `first` on, once and in order, from this side: its own log-probability, rank and likeliest."""
    told = outcome.scores
    assert [(who, index) for who, index, _ in told] == [(side, index) for index in range(first, len(prompt))]
    expected = oracle.logprobs(prompt)
    for _, index, token in told:
        row = expected[index - 1]
        assert token.logprob == pytest.approx(float(row[prompt[index]]), abs=1e-4)
        near = int((row > row[prompt[index]] + 1e-4).sum()), int((row > row[prompt[index]] - 1e-4).sum())
        assert near[0] < token.rank <= max(near[1], near[0] + 1)
        best = torch.topk(row, NUM_TOP)
        assert [top.logprob for top in token.top_logprobs] == pytest.approx(best.values.tolist(), abs=1e-4)


@pytest.mark.parametrize("length", [1, 2, PAGE, PAGE + 1, 32, 33, 200])
async def test_prefill_tells_of_each_token_before_the_first_one_that_is_sampled(
    pair: WorkerPair, oracle: Oracle, length: int
) -> None:
    """Chunks are of 32 tokens."""
    prompt = prompt_of(length)
    async with Router(pair) as router:
        (outcome,) = await router.ask(asked(prompt))
    check(outcome, prompt, oracle, side="prefill")
    assert outcome.ids() == oracle.greedy(prompt, 4)


async def test_prompts_beside_each_other_get_their_own(pair: WorkerPair, oracle: Oracle) -> None:
    prompts = [prompt_of(length, seed=length) for length in (70, 9, 33, 5)]
    async with Router(pair) as router:
        outcomes = await router.ask(
            *(asked(prompt) for prompt in prompts), Ask(prompt_of(40), greedy()), asked(prompts[0], n=3)
        )
    for outcome, prompt in zip(outcomes, prompts, strict=False):
        check(outcome, prompt, oracle, side="prefill")
    assert not outcomes[4].scores
    check(outcomes[5], prompts[0], oracle, side="prefill")


async def test_a_cached_prefix_is_no_hindrance(pair: WorkerPair, oracle: Oracle) -> None:
    prompt = prompt_of(100)
    async with Router(pair) as router:
        await router.ask(Ask(prompt, greedy()))
        await pair.settled()
        (whole,) = await router.ask(asked(prompt))
        await pair.settled()
        (rest,) = await router.ask(asked(prompt, num_known=50))
        await pair.settled()
        (plain,) = await router.ask(plain_ask := Ask(prompt, greedy()))
        await router.heard(plain_ask, "prefill.handoff_done")
    check(whole, prompt, oracle, side="prefill")
    check(rest, prompt, oracle, side="prefill", first=50)
    assert whole.ids() == rest.ids() == plain.ids() == oracle.greedy(prompt, 4)
    assert plain.done is not None
    assert plain.done.num_cached_tokens == 96, "what was computed for log-probabilities is a prefix for others"


async def test_decode_tells_of_a_prompt_that_it_computes(pair: WorkerPair, oracle: Oracle) -> None:
    """Also of one that it has in its cache, and beside choices that it generates."""
    prompt, others = prompt_of(90), [Ask(prompt_of(20, seed=n), greedy(40), local=ALL) for n in range(3)]
    async with Router(pair) as router:
        await router.ask(Ask(prompt, greedy(), local=ALL))
        await pair.settled()
        outcome, *_ = await router.ask(asked(prompt, local=ALL, n=2), *others)
    check(outcome, prompt, oracle, side="decode")
    assert outcome.local is not None
    assert outcome.local.num_cached_tokens == 0
    assert outcome.ids(1) == oracle.greedy(prompt, 4)


async def test_a_retry_tells_what_the_router_lacks_though_its_prompt_is_kept(pair: WorkerPair, oracle: Oracle) -> None:
    """Prefill has the first token already and does not sample it again."""
    prompt = prompt_of(100)
    async with Router(pair) as router:
        router.attaches = False
        first = await router.begin(asked(prompt))
        await router.until(lambda: router.outcomes[first.key].tokens, "the first token")
        router.attaches = True
        again = asked(prompt, request_id=first.request_id, attempt=2, num_known=40)
        (outcome,) = await router.ask(again)
        given = (pb.ChoiceJournal(choice=0, token_ids=outcome.ids()[:2]),)
        third = asked(prompt, request_id=first.request_id, attempt=3, num_known=100, journal=given)
        (last,) = await router.ask(third)
    check(router.outcomes[first.key], prompt, oracle, side="prefill")
    check(outcome, prompt, oracle, side="prefill", first=40)
    assert outcome.ids() == oracle.greedy(prompt, 4)
    assert not last.scores, "all were there"


async def test_a_prompt_that_loses_its_pages_tells_nothing_twice(pair: WorkerPair, oracle: Oracle) -> None:
    """Another prompt has decode's pages, so it takes those of this one in the midst of its chunks."""
    prompt = prompt_of(120)
    async with Router(pair) as router:
        router.attaches = False
        with Gate(pair.prefill.parts.engine, "forward", first=2) as gate, pair.hogged(pair.prefill, num_free=10):
            slow = await router.begin(asked(prompt))
            await gate.wait()
            urgent = await router.begin(Ask(prompt_of(60), greedy()))
            await router.heard(urgent, "decode.granted")
            await router.attach(urgent)
            await router.until_attached(urgent)
            gate.open()
            await router.finish(urgent)
            await router.heard(slow, "decode.granted")
            await router.attach(slow)
            outcome = await router.finish(slow)
    check(outcome, prompt, oracle, side="prefill")
    assert outcome.ids() == oracle.greedy(prompt, 4)


@pytest.mark.parametrize("local", [0, ALL])
async def test_a_prompt_whose_logits_are_no_numbers_fails(pair: WorkerPair, local: int) -> None:
    worker = pair.decode if local else pair.prefill
    forward = worker.parts.engine.forward

    def broken(sequences: Any, on_layer: Any = None) -> Any:
        logits = forward(sequences, on_layer).clone()
        logits[0] = float("nan")
        return logits

    worker.parts.engine.forward = broken  # type: ignore[method-assign]
    try:
        async with Router(pair) as router:
            ask = asked(prompt_of(40), local=local)
            await (router.reserve(ask) if local else router.begin(ask))
            await router.heard(ask, "decode.failed" if local else "prefill.failed")
            (failure,) = router.outcomes[ask.key].failures.values()
            assert (failure.code, "NaN" in failure.message) == ("internal", True)
            await router.cancel(ask)
    finally:
        del worker.parts.engine.forward
