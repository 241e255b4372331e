"""A prefill and a decode worker to be sent bad bytes, for modules that name this one in `pytest_plugins`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
from hypothesis import settings

from tests.support.scripted_router import Ask, Router
from tests.support.worker_pair import CONFIG, Oracle, WorkerPair, prompt_of, running_pair
from tests.unit.rpc.wire_fuzz import FUZZ

#: Where each example is a whole request.
FEW = settings(FUZZ, max_examples=15)

PARAMS = Ask([]).params
SETTLE_S = 9.0
SHORT_LEASE = {**CONFIG, "transport": {"lease_s": 4.0, "grace_s": 0.5}}


@pytest.fixture(scope="session")
def own_pair(worker_model_dir: Path) -> Iterator[WorkerPair]:
    with running_pair(worker_model_dir, config=SHORT_LEASE) as pair:
        yield pair


@pytest_asyncio.fixture(loop_scope="session")
async def fuzzed(own_pair: WorkerPair, oracle: Oracle) -> AsyncIterator[WorkerPair]:
    """The pair; afterwards it holds nothing and serves as ever."""
    own_pair.drop_caches()
    await serves(own_pair, oracle)
    yield own_pair
    await own_pair.settled(SETTLE_S)
    await serves(own_pair, oracle)
    await own_pair.settled(SETTLE_S)


async def serves(pair: WorkerPair, oracle: Oracle) -> None:
    prompt = prompt_of(40)
    async with Router(pair) as router:
        (outcome,) = await router.ask(Ask(prompt))
        assert outcome.ids() == oracle.greedy(prompt, PARAMS.max_tokens)
