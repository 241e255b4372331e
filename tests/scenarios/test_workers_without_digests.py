"""`transport.digests: false`: pages are taken as they come, and only by workers that were told the same."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtransfer.layout import check_compatible
from kvtransfer.wire import kv_format
from tandem.core.errors import IncompatibleError
from tests.support.scripted_router import Ask, Router
from tests.support.worker_pair import CONFIG, SHARED_LOOP, Oracle, Stash, WorkerPair, prompt_of, running_pair

pytest_plugins = ["tests.support.worker_pair"]
pytestmark = SHARED_LOOP


@pytest.fixture(scope="module")
def unchecked(worker_model_dir: Path) -> Iterator[WorkerPair]:
    with running_pair(worker_model_dir, config={**CONFIG, "transport": {"digests": False}}) as pair:
        yield pair


async def test_a_handoff_gives_the_same_tokens(unchecked: WorkerPair, oracle: Oracle) -> None:
    ask = Ask(prompt_of(60))
    async with Router(unchecked) as router:
        (outcome,) = await router.ask(ask)
    assert outcome.ids() == oracle.greedy(ask.prompt, 12)
    await unchecked.settled()


async def test_a_damaged_page_is_not_noticed(unchecked: WorkerPair) -> None:
    """That is what the key gives up: nobody reads the page."""
    ask = Ask(prompt_of(70, seed=4))
    async with Router(unchecked) as router:
        with Stash(unchecked.prefill.driver, "_write") as held:
            await router.begin(ask)
            await held.wait()
            page = min(unchecked.prefill.driver._entries[ask.key].pages)
            unchecked.prefill.parts.engine.arena.extent_view(0, page)[5] ^= 1
        outcome = await router.finish(ask)
    assert outcome.done is not None
    assert not outcome.failures
    await unchecked.settled()


async def test_who_takes_digests_does_not_pair_with_who_does_not(unchecked: WorkerPair, pair: WorkerPair) -> None:
    ours, theirs = unchecked.prefill.parts.info, pair.decode.parts.info
    with pytest.raises(IncompatibleError, match="digest: prefill-0 has 'none', decode-0 has 'xxh3_64'"):
        check_compatible(kv_format(ours), "prefill-0", kv_format(theirs), "decode-0")
