"""Pages that the pool has given up come back from disk or host memory, with the tokens that computing them gives."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tandem.worker.page_tiers import TieredPages
from tests.support.scripted_router import Ask, Router
from tests.support.waiting import until
from tests.support.worker_pair import (
    CONFIG,
    PAGE,
    SHARED_LOOP,
    AnyWorker,
    Oracle,
    WorkerPair,
    counted,
    prompt_of,
    running_pair,
)

pytest_plugins = ["tests.support.worker_pair"]
pytestmark = SHARED_LOOP

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


@pytest.fixture
def seeds() -> Iterator[int]:
    return iter(range(1, 100))


@pytest.mark.parametrize("seed", [1])
async def test_an_evicted_prompt_comes_back_at_prefill(tiered: WorkerPair, oracle: Oracle, seed: int) -> None:
    prompt, worker = prompt_of(LENGTH, seed), tiered.prefill
    counters, tiers = worker.parts.counters, tiers_of(worker)
    async with Router(tiered) as router:
        before = num_kept(worker)
        (first,) = await router.ask(Ask(prompt))
        await kept(worker, before + NUM_PAGES)
        await tiered.settled()
        tiered.drop_caches()
        cached, computed, fetched = (
            counters.num_prompt_tokens_cached, counters.num_prompt_tokens_computed, tiers.counters.num_fetched
        )  # fmt: skip
        (second,) = await router.ask(Ask(prompt))
    assert first.ids() == second.ids() == oracle.greedy(prompt, 12)
    assert counters.num_prompt_tokens_cached - cached == NUM_PAGES * PAGE
    assert counters.num_prompt_tokens_computed - computed == LENGTH - NUM_PAGES * PAGE
    assert tiers.counters.num_fetched - fetched == NUM_PAGES
    await tiered.settled()


async def test_an_evicted_prompt_comes_back_at_decode(tiered: WorkerPair, oracle: Oracle) -> None:
    """Where decode can then compute what is left of it."""
    prompt, worker = prompt_of(LENGTH, seed=2), tiered.decode
    async with Router(tiered) as router:
        before = num_kept(worker)
        await router.ask(Ask(prompt, local=ALL))
        await kept(worker, before + NUM_PAGES)
        await tiered.settled()
        tiered.drop_caches()
        with counted(tiered, computed=4, cached=NUM_PAGES * PAGE):
            (outcome,) = await router.ask(Ask(prompt, local=4))
    assert outcome.local is not None
    assert (outcome.local.num_cached_tokens, outcome.local.num_computed_tokens) == (NUM_PAGES * PAGE, 4)
    assert outcome.ids() == oracle.greedy(prompt, 12)
    await tiered.settled()
