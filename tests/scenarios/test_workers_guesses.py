"""Guesses change how many tokens a step gives, and nothing of what they are; real workers, with guesses and without."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from router.openai.grammar import of_choices
from tandem.core.clock import VirtualClock
from tandem.core.config import LimitsConfig
from tandem.core.sampling import SamplingParams
from tandem.engine.engine import Engine
from tandem.engine.random_model import ModelSpec, save
from tandem.worker.draft_model import DraftModel
from tandem.worker.drafts import Drafts
from tests.scenarios.test_workers_local import journals
from tests.support.scripted_router import Ask, Outcome, Router
from tests.support.worker_pair import CONFIG, PAGE, SHARED_LOOP, WorkerPair, prompt_of, running_pair

pytest_plugins = ["tests.support.worker_pair"]
pytestmark = SHARED_LOOP

NUM_NEW = 60
#: Of a random model these outputs repeat themselves: of one token always, of two and three often.
FORCED = {
    "one": {"allowed_token_ids": (5,)},
    "two": {"allowed_token_ids": (5, 6)},
    "three, greedy": {"allowed_token_ids": (5, 6, 7), "temperature": 0.0},
    "logprobs": {"allowed_token_ids": (5, 6), "num_logprobs": 2},
    "penalties": {"allowed_token_ids": (5, 6), "frequency_penalty": 0.3, "repetition_penalty": 1.1},
    "bad words": {"allowed_token_ids": (5, 6), "bad_words": ((5, 5, 5, 5),)},
    "an end": {"allowed_token_ids": (5, 6, 1), "ignore_eos": False, "logit_bias": ((1, -4.0),)},
    "a stop": {"allowed_token_ids": (5, 6, 7), "stop_token_ids": (7,), "min_tokens": 9, "logit_bias": ((7, -4.0),)},
    "a grammar": {"grammar": of_choices(["abcd" * 14], "choice", LimitsConfig()).text, "ignore_eos": False},
    "nothing": {},
}


@pytest.fixture(scope="module")
def looking_up(worker_model_dir: Path) -> Iterator[WorkerPair]:
    with running_pair(worker_model_dir, config={**CONFIG, "speculation": {"lookup_tokens": 5}}) as pair:
        yield pair


@pytest.fixture(scope="module")
def drafting_pair(worker_model_dir: Path) -> Iterator[WorkerPair]:
    """Its draft is the model itself with rounded weights: it is often right, and often wrong."""
    speculation = {"draft_model": str(worker_model_dir), "draft_quantize": "int4", "draft_memory_bytes": 1 << 20}
    with running_pair(worker_model_dir, config={**CONFIG, "speculation": speculation}) as pair:
        # A pass takes as long as a step here, so by the clock it would never pay: nothing is known of times.
        drafts = drafts_of(pair)
        drafts._clock, drafts.step_took = VirtualClock(), lambda *_, **__: None  # type: ignore[method-assign]
        yield pair


@pytest.fixture
def drafting(drafting_pair: WorkerPair) -> WorkerPair:
    """It has not learnt of the last test that its draft is wrong."""
    for acceptance in drafts_of(drafting_pair)._acceptance.values():
        acceptance.value = 0.7
    return drafting_pair


@pytest.fixture(params=["looking_up", "drafting"])
def guessing(request: pytest.FixtureRequest) -> WorkerPair:
    pair: WorkerPair = request.getfixturevalue(request.param)
    return pair


def drafts_of(pair: WorkerPair) -> Drafts:
    guesses = pair.decode.core._guesses
    assert guesses is not None
    assert isinstance(guesses.drafts, Drafts)
    return guesses.drafts


def counts_of(pair: WorkerPair) -> tuple[int, int]:
    """Guesses, and how many of them were right."""
    counters = pair.decode.parts.counters
    return counters.num_guesses + counters.num_drafts, counters.num_right_guesses + counters.num_right_drafts


@contextlib.contextmanager
def proposing(pair: WorkerPair, engine: Engine) -> Iterator[None]:
    """Another draft, for a while."""
    drafts, target = drafts_of(pair), pair.decode.parts.engine
    model = DraftModel(engine, target.vocab_size, target.sampler())
    before, drafts._compute = drafts._compute, model
    try:
        yield
    finally:
        drafts._compute = before


def params_of(**given: Any) -> SamplingParams:
    return SamplingParams(**({"temperature": 0.8, "seed": 11, "max_tokens": NUM_NEW, "ignore_eos": True} | given))


def same(found: Outcome, expected: Outcome, num_choices: int) -> None:
    assert found.finished == expected.finished
    for choice in range(num_choices):
        assert found.ids(choice) == expected.ids(choice)
        assert found.logprobs[choice] == expected.logprobs[choice]


@pytest.mark.parametrize("local", [0, 512], ids=["handed off", "computed here"])
@pytest.mark.parametrize("given", FORCED.values(), ids=FORCED)
async def test_outputs_are_the_same(guessing: WorkerPair, pair: WorkerPair, given: dict[str, Any], local: int) -> None:
    params, outcomes = params_of(**given), []
    before = counts_of(guessing)
    for one in (guessing, pair):
        one.drop_caches()
        async with Router(one) as router:
            (outcome,) = await router.ask(Ask(prompt_of(45), params, n=2, local=local))
        await one.settled()
        outcomes.append(outcome)
    same(*outcomes, num_choices=2)
    if given and max(len(outcomes[0].ids(choice)) for choice in range(2)) > NUM_NEW // 2:
        num, num_right = counts_of(guessing)
        assert num > before[0]
        if "grammar" not in given or guessing.decode.parts.draft is None:  # of which a draft does not know
            assert num_right > before[1]


async def test_many_beside_each_other_and_moves_of_journals(guessing: WorkerPair, pair: WorkerPair) -> None:
    """What one worker has begun with guesses, another goes on with without, and the other way round."""
    params = params_of(allowed_token_ids=(5, 6))
    prompts = [prompt_of(length) for length in (3, 17, 45, 100)]
    whole = []
    for one in (guessing, pair):
        async with Router(one) as router:
            whole.append(await router.ask(*(Ask(prompt, params) for prompt in prompts)))
        await one.settled()
    for found, expected in zip(*whole, strict=True):
        same(found, expected, 1)
    for one in (guessing, pair):
        async with Router(one) as router:
            asks = [
                Ask(prompt, params, attempt=2, local=512, journal=journals(outcome, {0: 7 * number + 2}))
                for number, (prompt, outcome) in enumerate(zip(prompts, whole[0], strict=True))
            ]
            for number, (rest, outcome) in enumerate(zip(await router.ask(*asks), whole[0], strict=True)):
                assert rest.ids() == outcome.ids()[7 * number + 2 :]
        await one.settled()


async def test_pages_of_what_was_guessed_are_right_for_the_next(guessing: WorkerPair) -> None:
    """A turn that follows finds the pages of the answer in the cache, and goes on as if it computed all anew."""
    params = params_of(allowed_token_ids=(5, 6))
    async with Router(guessing) as router:
        (first,) = await router.ask(Ask(prompt_of(45), params, local=512))
        await guessing.settled()
        following = [*prompt_of(45), *first.ids(), *prompt_of(9)]
        (found,) = await router.ask(Ask(following, params_of(), local=512))
        assert found.local is not None
        assert found.local.num_cached_tokens >= 96
        await guessing.settled()
        guessing.drop_caches()
        (anew,) = await router.ask(Ask(following, params_of(), local=512))
    assert found.ids() == anew.ids()
    await guessing.settled()


@pytest.mark.parametrize("kind", ["itself", "a stranger"])
async def test_the_draft_decides_how_many_and_not_what(
    drafting: WorkerPair, pair: WorkerPair, worker_model_dir: Path, tmp_path: Path, kind: str
) -> None:
    model_dir = worker_model_dir if kind == "itself" else save(ModelSpec(layers=1, max_positions=512, seed=5), tmp_path)
    engine = Engine.load(model_dir, page_size=PAGE, num_pages=85, num_threads=1, probe=False)
    counters = drafting.decode.parts.counters
    before, outcomes = (counters.num_drafts, counters.num_right_drafts), []
    asks = [
        Ask(prompt_of(21, seed), params_of(temperature=temperature, max_tokens=160), n=2)
        for seed, temperature in enumerate((0.0, 0.8))
    ]
    for one in (drafting, pair):
        one.drop_caches()
        with proposing(one, engine) if one is drafting else contextlib.nullcontext():
            async with Router(one) as router:
                outcomes.append(await router.ask(*asks))
            await one.settled()
    for found, expected in zip(*outcomes, strict=True):
        same(found, expected, 2)
    num, num_right = counters.num_drafts - before[0], counters.num_right_drafts - before[1]
    assert num > 0
    if kind == "itself":
        assert num_right == num > 60
    else:
        assert num_right < num / 4
    assert drafts_of(drafting).pool.counts().used == 0


async def test_where_pages_are_short_proposals_are_in_nobodys_way(drafting: WorkerPair, pair: WorkerPair) -> None:
    params, outcomes = params_of(max_tokens=150), []
    before = counts_of(drafting)
    for one in (drafting, pair):
        with one.hogged(one.decode, 20):
            async with Router(one) as router:
                outcomes.append(await router.ask(*(Ask(prompt_of(17, seed), params) for seed in range(3))))
            preemptions = one.decode.parts.counters.num_preemptions
        await one.settled()
        assert preemptions
    for found, expected in zip(*outcomes, strict=True):
        same(found, expected, 1)
    assert counts_of(drafting)[1] > before[1]
    drafts_of(drafting).pool.check()
    assert drafts_of(drafting).pool.counts().used == 0
