"""A mixed model, some of whose layers have a window while the others see all: pages of the former are given back behind
it, a handoff has only what is seen, and the tokens are transformers' own.

With all their pages kept its contexts would be longer than the pools.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from decode_worker.worker import DecodeWorker
from tandem.core.config_tree import build
from tandem.core.identity import Role
from tandem.core.layer_groups import LayerGroups
from tandem.engine.random_model import ModelSpec, save
from tandem.rpc.v1 import common_pb2 as pb
from tandem.sim.load import Arrival
from tandem.sim.scenario import Scenario
from tandem.sim.world import World
from tandem.worker.process import WorkerProcess
from tests.support.scripted_router import Ask, Router
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
# Of ten layers three see all, and so many lie in a page; the seven others need three pages, with two extents to spare.
GROUPS = LayerGroups(PAGE, WINDOW, 3)
NUM_PAGES = 84  # 336 tokens, were all kept
MOST_PLACES = 6  # for the window and a chunk of 32, wherever they begin
MOST_DECODING = 4  # for the window, and the place that is written to
EXTENT_BYTES = 2 * PAGE * 2 * 16 * 4
ALL = 4096  # more than any prompt has


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    spec = ModelSpec(arch="qwen3", std=0.2, layers=10, full_every=3, max_positions=2048, sliding_window=WINDOW, seed=1)
    return save(spec, tmp_path_factory.mktemp("qwen3") / "model")


@pytest.fixture(scope="module")
def oracle_of_mixed(model_dir: Path) -> Oracle:
    return Oracle(model_dir)


@pytest.fixture(scope="module")
def shared_mixed(model_dir: Path) -> Iterator[WorkerPair]:
    with running_pair(model_dir, prefill_pages=NUM_PAGES, decode_pages=NUM_PAGES) as pair:
        yield pair


@pytest.fixture
def mixed(shared_mixed: WorkerPair) -> WorkerPair:
    shared_mixed.drop_caches()
    return shared_mixed


@pytest.fixture(scope="module")
def second_decode(model_dir: Path) -> Iterator[WorkerProcess[DecodeWorker]]:
    worker = make_worker(DecodeWorker, model_dir, NUM_PAGES, CONFIG, "decode-1")
    try:
        worker.start()
        yield worker
    finally:
        worker.stop()


@pytest.mark.parametrize("local", [0, ALL], ids=["handed off", "computed at decode"])
async def test_tokens_are_those_of_transformers(mixed: WorkerPair, oracle_of_mixed: Oracle, local: int) -> None:
    """Prompts around the window and far beyond it, and an output that leaves its prompt behind."""
    lengths = (1, WINDOW - 1, WINDOW, WINDOW + 1, 57, 200, 700)
    asks = [Ask(prompt_of(length), params(), local=local) for length in lengths]
    asks.append(Ask(prompt_of(20, seed=1), params(150), local=local))
    async with Router(mixed) as router:
        for ask, outcome in zip(asks, await router.ask(*asks), strict=True):
            assert outcome.ids() == oracle_of_mixed.greedy(ask.prompt, ask.params.max_tokens)
            if not local:
                await router.heard(ask, "prefill.handoff_done")
                assert outcome.done is not None
                assert outcome.done.num_extents == 3 * GROUPS.num_seen(len(ask.prompt)), "what is not seen is not sent"
    await mixed.settled()


@pytest.mark.parametrize("local", [0, ALL], ids=["handed off", "computed at decode"])
async def test_layers_with_a_window_hold_no_more_than_it(
    mixed: WorkerPair, oracle_of_mixed: Oracle, local: int
) -> None:
    for num_prompt, num_output in ((70, 15), (700, 150)):
        ask = Ask(prompt_of(num_prompt, seed=2), params(num_output), local=local)
        schedulers = [worker.parts.scheduler for worker in (mixed.prefill, mixed.decode)]
        with most_held(schedulers[0]) as at_prefill, most_held(schedulers[1]) as at_decode:
            async with Router(mixed) as router:
                (outcome,) = await router.ask(ask)
                await mixed.settled()
        assert outcome.ids() == oracle_of_mixed.greedy(ask.prompt, num_output)
        of_prompt, of_all = (-(-num_tokens // PAGE) for num_tokens in (num_prompt, num_prompt + num_output))
        assert at_prefill["pages"] <= (0 if local else of_prompt + 3 * MOST_PLACES)
        most_decoding = max(of_prompt + 3 * MOST_PLACES if local else 0, of_all + 3 * MOST_DECODING)
        assert of_all <= at_decode["pages"] <= most_decoding
        assert most_held_by_simulated(num_prompt, num_output, local=local > 0) == (
            at_prefill["pages"], at_decode["pages"]
        )  # fmt: skip
        mixed.drop_caches()


def most_held_by_simulated(num_prompt: int, num_output: int, *, local: bool) -> tuple[int, int]:
    """By a simulated pair of workers, whose memory has as many pages."""
    text = {
        "prefill": {"workers": 1 - local, "tokens": -(-NUM_PAGES * PAGE * 3 // 10)},
        "decode": {"tokens": -(-NUM_PAGES * PAGE * 3 // 10)},
        "model": {"layers": 10, "window": WINDOW, "full_layers": 3},
        "times": "fitted",
        "card": {"is_cpu": True},
        "tandem": CONFIG,
    }
    world = World(build(Scenario, text).shape(), at_once=False)
    with contextlib.ExitStack() as stack:
        seen = {machine.role: stack.enter_context(most_held(machine.scheduler)) for machine in world.machines.values()}
        world.run([Arrival(0, 0.0, num_prompt, num_output)])
    assert {machine.pool.num_pages for machine in world.machines.values()} == {NUM_PAGES}
    return 0 if local else seen[Role.PREFILL]["pages"], seen[Role.DECODE]["pages"]


async def test_many_at_once_preempt_each_other_and_end(mixed: WorkerPair, oracle_of_mixed: Oracle) -> None:
    before = mixed.decode.parts.counters.num_preemptions
    asks = [Ask(prompt_of(60 + length, seed=3), params(90), n=4, local=ALL * (length % 2)) for length in range(3)]
    async with Router(mixed) as router:
        for ask, outcome in zip(asks, await router.ask(*asks), strict=True):
            expected = oracle_of_mixed.greedy(ask.prompt, 90)
            assert [outcome.ids(choice) for choice in range(4)] == [expected] * 4
    await mixed.settled()
    assert mixed.decode.parts.counters.num_preemptions > before


async def test_choices_share_what_they_see_of_their_prompt(mixed: WorkerPair) -> None:
    drawn = params(70, temperature=0.8, seed=11, num_logprobs=2)
    async with Router(mixed) as router:
        for local in (0, ALL):
            (together,) = await router.ask(Ask(prompt_of(150, seed=4), drawn, n=3, local=local))
            for choice in range(3):
                other = [n for n in range(3) if n != choice]
                ended = tuple(pb.ChoiceJournal(choice=n, token_ids=together.ids(n), finished=True) for n in other)
                (alone,) = await router.ask(Ask(prompt_of(150, seed=4), drawn, n=3, journal=ended, local=local))
                assert alone.ids(choice) == together.ids(choice)
                assert alone.logprobs[choice] == together.logprobs[choice]
    await mixed.settled()


@pytest.mark.parametrize("local", [0, ALL], ids=["handed off", "computed at decode"])
async def test_the_next_turn_finds_the_one_before(mixed: WorkerPair, oracle_of_mixed: Oracle, local: int) -> None:
    first = Ask(prompt_of(150, seed=5), params(30), local=local)
    async with Router(mixed) as router:
        (outcome,) = await router.ask(first)
        await mixed.settled()
        turn = [*first.prompt, *(outcome.ids() if local else []), *prompt_of(25, seed=6)]
        again = Ask(turn, params(), local=local)
        (found,) = await router.ask(again)
        assert found.ids() == oracle_of_mixed.greedy(turn, 12)
        if local:
            assert found.local is not None
            assert found.local.num_cached_tokens == 179 // PAGE * PAGE
        else:
            await router.heard(again, "prefill.handoff_done")
            assert found.done is not None
            assert found.done.num_cached_tokens == 150 // PAGE * PAGE
            # Decode has the first turn's pages as well: what layers see all of, and what the others see from there on.
            num_there = 150 // PAGE
            index = GROUPS.index_of(num_there, GROUPS.num_hidden(len(turn)))
            assert found.done.num_extents == 3 * (GROUPS.num_seen(len(turn)) - index)
    await mixed.settled()


async def test_where_a_seen_page_is_gone_nothing_behind_it_is_taken(mixed: WorkerPair, oracle_of_mixed: Oracle) -> None:
    prompt, pool = prompt_of(100, seed=7), mixed.prefill.parts.pool
    async with Router(mixed) as router:
        await router.ask(Ask(prompt, params()))
        await mixed.settled()
        # Pages of layers with a window have longer keys; the last three are of the seventh place, which is not full.
        keys = mixed.on_runner(mixed.prefill, lambda: [key for key in pool._page_of if len(key) > 32])
        mixed.on_runner(mixed.prefill, lambda: pool.discard(keys[-5:-4]))
        ask = Ask(prompt, params())
        (outcome,) = await router.ask(ask)
        await router.heard(ask, "prefill.handoff_done")
        assert outcome.done is not None
        assert outcome.done.num_cached_tokens < 6 * PAGE
        assert outcome.ids() == oracle_of_mixed.greedy(prompt, 12)
    await mixed.settled()


@pytest.mark.parametrize("given", [{}, {"temperature": 0.8, "seed": 11}], ids=["greedy", "drawn"])
async def test_what_a_lost_decode_worker_had_goes_on_elsewhere(
    mixed: WorkerPair, second_decode: WorkerProcess[DecodeWorker], given: dict[str, Any]
) -> None:
    """Prefill has retained what is seen of the prompt, and computes nothing; decode replays the output."""
    other = WorkerPair(mixed.prefill_process, second_decode)
    ask = Ask(prompt_of(300, seed=8), params(90, **given))
    async with Router(mixed) as first, Router(other, "s") as second:
        (whole,) = await first.ask(ask)
        await first.heard(ask, "prefill.handoff_done")
        before = mixed.prefill.parts.counters.num_prompt_tokens_computed
        for attempt, num_known in ((2, 1), (3, 61)):
            journal = (pb.ChoiceJournal(choice=0, token_ids=whole.ids()[:num_known]),)
            again = dataclasses.replace(ask, attempt=attempt, journal=journal)
            (rest,) = await second.ask(again)
            assert rest.ids() == whole.ids()[num_known:]
        assert mixed.prefill.parts.counters.num_prompt_tokens_computed == before
        # Prefill is lost, too: decode computes all, and replays.
        mixed.on_runner(second_decode.worker, second_decode.parts.pool.drop_cache)
        journal = (pb.ChoiceJournal(choice=0, token_ids=whole.ids()[:61]),)
        (alone,) = await second.ask(dataclasses.replace(ask, attempt=4, journal=journal, local=ALL))
        assert alone.ids() == whole.ids()[61:]
    await mixed.settled()
    await other.settled()


async def test_a_prompt_that_is_cancelled_in_its_middle_leaves_nothing(mixed: WorkerPair) -> None:
    async with Router(mixed) as router:
        for local in (0, ALL):
            ask = Ask(prompt_of(900, seed=9), params(), local=local)
            await (router.reserve(ask) if local else router.begin(ask))
            await router.heard(ask, "decode.local" if local else "prefill.started")
            await router.cancel(ask)
    await mixed.settled()


async def test_where_all_pages_are_kept_tiers_have_copies_of_them(
    model_dir: Path, oracle_of_mixed: Oracle, caplog: pytest.LogCaptureFixture
) -> None:
    """Pages of layers with a window go to no tier, and the log says what can be done about it."""
    prompt = prompt_of(100, seed=10)
    for is_mixed, num_pages in ((True, NUM_PAGES), (False, 4 * NUM_PAGES)):
        cache = {**CONFIG["cache"], "host_bytes": 4 << 20, "mixed_windows": is_mixed}
        sizes = {"prefill_pages": num_pages, "decode_pages": num_pages}
        with running_pair(model_dir, **sizes, config={**CONFIG, "cache": cache}) as pair:
            assert [worker.parts.tiers is None for worker in (pair.prefill, pair.decode)] == [is_mixed] * 2
            ask = Ask(prompt, params())
            async with Router(pair) as router:
                (outcome,) = await router.ask(ask)
                await router.heard(ask, "prefill.handoff_done")
            await pair.settled()
        assert outcome.ids() == oracle_of_mixed.greedy(prompt, 12)
        assert outcome.done is not None
        assert outcome.done.num_bytes == (3 * GROUPS.num_seen(100) if is_mixed else 10 * 7) * EXTENT_BYTES
        assert ("cache.mixed_windows off" in caplog.text) is is_mixed
        caplog.clear()


async def test_guesses_change_no_token(mixed: WorkerPair, model_dir: Path) -> None:
    """Of guesses that are wrong K and V are in the pages of both kinds of layers, and nobody reads them."""
    drawn = params(120, temperature=0.8, seed=11, allowed_token_ids=(5, 6))
    asks = [Ask(prompt_of(length, seed=length), drawn, local=local) for length in (30, 150) for local in (0, ALL)]
    config = CONFIG | {"speculation": {"lookup_tokens": 5}}
    with running_pair(model_dir, prefill_pages=NUM_PAGES, decode_pages=NUM_PAGES, config=config) as guessing:
        async with Router(mixed) as plain, Router(guessing, "s") as router:
            expected = [outcome.ids() for outcome in await plain.ask(*asks)]
            assert [outcome.ids() for outcome in await router.ask(*asks)] == expected
        counters = guessing.decode.parts.counters
        assert 0 < counters.num_right_guesses < counters.num_guesses
        await guessing.settled()
    await mixed.settled()
