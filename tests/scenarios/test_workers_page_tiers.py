"""Pages that the pool has given up come back from disk or host memory, with the tokens that computing them gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tandem.core.tiers import Rate
from tandem.worker.page_tiers import TieredPages
from tests.support.scripted_router import Ask, Router
from tests.support.waiting import until
from tests.support.worker_pair import (
    CONFIG,
    PAGE,
    SHARED_LOOP,
    AnyWorker,
    Gate,
    Oracle,
    WorkerPair,
    counted,
    prompt_of,
    running_pair,
)

pytest_plugins = ["tests.support.worker_pair"]
pytestmark = SHARED_LOOP

ON_DISK = pytest.mark.parametrize("tiered", ["disk"], indirect=True)
ALL = 512  # more than any prompt has
NUM_PAGES = 6
LENGTH = NUM_PAGES * PAGE + 4


def with_tier(kind: str, directory: Path) -> dict[str, Any]:
    tier = {"disk_path": str(directory)} if kind == "disk" else {"host_bytes": 4 << 20}
    return {**CONFIG, "cache": {**CONFIG["cache"], **tier}}


@pytest.fixture(scope="module", params=["disk", "host"])
def tiered(request: pytest.FixtureRequest, worker_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory = tmp_path_factory.mktemp("tier")
    with running_pair(worker_model_dir, config=with_tier(request.param, directory)) as pair:
        yield pair


def tiers_of(worker: AnyWorker) -> TieredPages:
    tiers = worker.parts.tiers
    assert tiers is not None
    return tiers


async def kept(worker: AnyWorker, num_pages: int) -> None:
    """Until so many pages are in the tier."""
    (store,) = tiers_of(worker).stores
    await until(lambda: store.held()[0], "pages in the tier", wanted=lambda num: num >= num_pages)


def num_kept(worker: AnyWorker) -> int:
    (store,) = tiers_of(worker).stores
    return store.held()[0]


async def evicted(pair: WorkerPair, router: Router, seed: int, local: int = 0) -> list[int]:
    """A prompt that was computed and kept, and that both pools have given up."""
    prompt, worker = prompt_of(LENGTH, seed), pair.decode if local else pair.prefill
    before = num_kept(worker)
    (outcome,) = await router.ask(Ask(prompt, local=local))
    assert outcome.finished
    await kept(worker, before + NUM_PAGES)
    await pair.settled()
    pair.drop_caches()
    tiers_of(worker)._compute_rate = Rate()  # as after a start: on a busy machine it may be either way
    return prompt


async def test_an_evicted_prompt_comes_back_at_prefill(tiered: WorkerPair, oracle: Oracle) -> None:
    counters, tiers = tiered.prefill.parts.counters, tiers_of(tiered.prefill)
    async with Router(tiered) as router:
        prompt = await evicted(tiered, router, seed=1)
        before = counters.num_prompt_tokens_cached, counters.num_prompt_tokens_computed, tiers.counters.num_fetched
        (outcome,) = await router.ask(Ask(prompt))
    after = counters.num_prompt_tokens_cached, counters.num_prompt_tokens_computed, tiers.counters.num_fetched
    assert outcome.ids() == oracle.greedy(prompt, 12)
    num_cached = NUM_PAGES * PAGE
    assert [b - a for a, b in zip(before, after, strict=True)] == [num_cached, LENGTH - num_cached, NUM_PAGES]
    await tiered.settled()


async def test_an_evicted_prompt_comes_back_at_decode(tiered: WorkerPair, oracle: Oracle) -> None:
    """Where decode can then compute what is left of it."""
    async with Router(tiered) as router:
        prompt = await evicted(tiered, router, seed=2, local=ALL)
        with counted(tiered, computed=4, cached=NUM_PAGES * PAGE):
            (outcome,) = await router.ask(Ask(prompt, local=4))
    assert outcome.local is not None
    assert (outcome.local.num_cached_tokens, outcome.local.num_computed_tokens) == (NUM_PAGES * PAGE, 4)
    assert outcome.ids() == oracle.greedy(prompt, 12)
    await tiered.settled()


@ON_DISK
async def test_a_handoff_does_not_wait_for_decodes_disk(tiered: WorkerPair, oracle: Oracle) -> None:
    """Prefill has the pages, or is about to: reading them here would hold up the grant."""
    async with Router(tiered) as router:
        prompt = await evicted(tiered, router, seed=3)
        await kept(tiered.decode, NUM_PAGES)
        before = tiers_of(tiered.decode).counters.num_fetched
        (outcome,) = await router.ask(Ask(prompt))
    assert outcome.grant is not None
    assert outcome.grant.num_cached_pages == 0
    assert tiers_of(tiered.decode).counters.num_fetched == before
    assert outcome.ids() == oracle.greedy(prompt, 12)
    await tiered.settled()


@ON_DISK
@pytest.mark.parametrize("local", [0, ALL], ids=["at prefill", "at decode"])
async def test_others_go_on_while_pages_are_read_and_a_read_that_hangs_is_given_up(
    tiered: WorkerPair, oracle: Oracle, local: int
) -> None:
    other, worker = prompt_of(50, seed=4), tiered.decode if local else tiered.prefill
    tiers = tiers_of(worker)
    (store,) = tiers.stores
    async with Router(tiered) as router:
        prompt = await evicted(tiered, router, seed=5 + local, local=local)
        ask = Ask(prompt, local=local)
        with Gate(store, "get") as gate:
            await (router.reserve(ask) if local else router.begin(ask))
            await gate.wait()
            (outcome,) = await router.ask(Ask(other, local=local))
            assert outcome.ids() == oracle.greedy(other, 12)
            outcome = await router.finish(ask)
            gate.open()
        assert outcome.ids() == oracle.greedy(prompt, 12)
    assert tiers.counters.num_abandoned >= NUM_PAGES
    tiers._paused_until_s = 0.0
    await tiered.settled()


@ON_DISK
@pytest.mark.parametrize("local", [0, ALL], ids=["at prefill", "at decode"])
async def test_a_cancel_while_pages_are_read(tiered: WorkerPair, local: int) -> None:
    (store,) = tiers_of(tiered.decode if local else tiered.prefill).stores
    async with Router(tiered) as router:
        ask = Ask(await evicted(tiered, router, seed=6 + local, local=local), local=local)
        with Gate(store, "get") as gate:
            await (router.reserve(ask) if local else router.begin(ask))
            await gate.wait()
            await router.cancel(ask, "decode", "prefill")
            gate.open()
        await tiered.settled()


@ON_DISK
async def test_pages_that_only_their_request_may_find_are_not_kept(tiered: WorkerPair) -> None:
    """Of a prompt of less than a page, retained at prefill under a private key."""
    worker = tiered.prefill
    before = num_kept(worker)
    async with Router(tiered) as router:
        await router.ask(Ask(prompt_of(PAGE - 3, seed=7)))
        await router.ask(Ask(prompt_of(PAGE, seed=8)))
        await kept(worker, before + 1)  # pages are written in order: that of the first prompt would be there
    assert num_kept(worker) == before + 1
    await tiered.settled()
