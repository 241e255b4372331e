"""Workers connect when they learn of each other: the first request finds the way of its pages made."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.support.scripted_router import Ask, Router
from tests.support.waiting import until
from tests.support.worker_pair import CONFIG, SHARED_LOOP, Gate, prompt_of, running_pair

pytest_plugins = ["tests.support.worker_pair"]
pytestmark = SHARED_LOOP


async def test_the_first_handoff_makes_no_call_to_pair(worker_model_dir: Path) -> None:
    with running_pair(worker_model_dir, config=CONFIG) as pair:
        decode = pair.decode.parts
        async with Router(pair) as router:
            await router.say("prefill", meet={"decode": [decode.info]})
            await until(lambda: decode.incarnation in pair.prefill.peers.peers, "the pairing")
            await pair_is_up(pair.prefill, decode.incarnation)
            link = pair.decode.links._links[pair.prefill.parts.incarnation]
            assert link.is_up.is_set(), "decode has heard the greeting by the transport"
            with Gate(pair.prefill.peers, "_pair", first=1 << 30) as calls:
                (outcome,) = await router.ask(Ask(prompt_of(100)))
            assert calls.num_calls == 0
            assert not outcome.failures
        await pair.settled()


async def pair_is_up(prefill: object, receiver: str) -> None:
    parts, connections = prefill.parts, prefill.connections  # type: ignore[attr-defined]
    waited = asyncio.run_coroutine_threadsafe(connections.wait_greeted(receiver), parts.loop)
    await asyncio.wait_for(asyncio.wrap_future(waited), 60)
