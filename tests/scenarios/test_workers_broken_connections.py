"""Connections for pages that break while both workers live: what the attempts under way hear, and what comes after."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio

from kvtransfer.transports.events import PeerId, WriteCompleted
from prefill_worker.worker import PrefillWorker
from tandem.core.errors import WorkerLostError
from tests.support.cut import shut_down
from tests.support.scripted_router import Ask, Router
from tests.support.waiting import until
from tests.support.worker_pair import CONFIG, SHARED_LOOP, Gate, Oracle, WorkerPair, prompt_of, running_pair

pytest_plugins = ["tests.support.worker_pair"]
pytestmark = SHARED_LOOP

NUM_REQUESTS = 8


@pytest.fixture
def over_tcp(
    worker_model_dir: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[WorkerPair]:
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    with running_pair(worker_model_dir, config=getattr(request, "param", CONFIG)) as pair:
        yield pair


@pytest_asyncio.fixture(loop_scope="session")
async def router(over_tcp: WorkerPair) -> AsyncIterator[Router]:
    async with Router(over_tcp) as router:
        yield router


def sockets(pair: WorkerPair) -> list[Any]:
    """TCP connections of the transport; both workers are in this process, as is the router."""
    services = {int(w.parts.info.address.rpartition(":")[2]) for w in (pair.prefill, pair.decode)}
    all_of_us = [c for c in psutil.Process().net_connections("tcp") if c.raddr]
    return [c for c in all_of_us if not {c.laddr.port, c.raddr.port} & services]


def num_sockets(pair: WorkerPair) -> int:
    return len(sockets(pair))


def cut(pair: WorkerPair) -> int:
    """Shut them."""
    return sum(shut_down(os.getpid(), connection) for connection in sockets(pair))


async def is_whole(pair: WorkerPair) -> None:
    """Until the pages' connection is up."""
    connections, receiver = pair.prefill.connections, pair.decode.parts.incarnation
    await until(lambda: connections.is_whole(receiver), "the connection")


def is_writing(prefill: PrefillWorker) -> bool:
    return any(entry.handoff._outstanding for entry in prefill.driver._entries.values())


async def next_attempt(router: Router, ask: Ask) -> Ask:
    """What the router does when an attempt has failed."""
    await router.cancel(ask, "prefill", "decode")
    return await router.begin(replace(ask, attempt=ask.attempt + 1))


async def test_attempts_whose_connection_broke_are_told_so_and_the_next_ones_wait_until_it_is_up(
    over_tcp: WorkerPair, router: Router, oracle: Oracle
) -> None:
    (first,) = await router.ask(Ask(prompt_of(60)))
    assert first.ids() == oracle.greedy(prompt_of(60), 12)
    asks = [Ask(prompt_of(100, seed=seed)) for seed in range(NUM_REQUESTS)]
    with Gate(over_tcp.decode, "kill_writer") as kills:
        assert cut(over_tcp) > 0
        begun = [await router.begin(ask) for ask in asks]
        for ask in begun:
            outcome = router.outcomes[ask.key]
            await router.until(lambda o=outcome: o.failures or "decode.admitted" in o.kinds, "a verdict", 60)
        failed = [ask for ask in begun if router.outcomes[ask.key].failures]
        assert failed, "nobody met the broken connection"
        reasons = {error.reason for ask in failed for error in router.outcomes[ask.key].failures.values()}
        assert "link_broken" in reasons
        again = {ask.request_id: await next_attempt(router, ask) for ask in failed}
        for ask in begun:
            outcome = await router.finish(again.get(ask.request_id, ask))
            assert outcome.ids() == oracle.greedy(ask.prompt, 12)
        await is_whole(over_tcp)
        await over_tcp.settled()
        assert kills.num_calls == 0
    assert [link.is_broken for link in router.links] == [True, False], "routers are told of the pair"


async def test_a_write_under_way_is_settled_by_closing_both_ends(
    over_tcp: WorkerPair, router: Router, oracle: Oracle
) -> None:
    """Its pages are nobody's until its bytes had their time to land; then they are back, at both sides."""
    await router.ask(Ask(prompt_of(60)))
    prefill, decode = over_tcp.prefill, over_tcp.decode
    with Gate(prefill.parts.transfer._transport, "poll", when=lambda: is_writing(prefill)) as polls:
        # Held in its transfer thread after the post: the write is outstanding when the connection breaks.
        ask = await router.begin(Ask(prompt_of(200, seed=5)))
        await polls.wait()
        assert cut(over_tcp) > 0
    with Gate(decode, "kill_writer") as kills:
        await router.until(lambda: router.outcomes[ask.key].failures, "the failure", 60)
        again = await next_attempt(router, ask)
        outcome = await router.finish(again)
        assert outcome.ids() == oracle.greedy(ask.prompt, 12)
        await is_whole(over_tcp)
        await over_tcp.settled()
        assert kills.num_calls == 0


async def test_a_connection_that_only_seemed_broken_is_kept_however_often_it_seems_so(
    over_tcp: WorkerPair, router: Router, oracle: Oracle
) -> None:
    """UCX would keep the sockets of each one that was closed, of both ends."""
    await router.ask(Ask(prompt_of(60)))
    prefill, receiver = over_tcp.prefill, over_tcp.decode.parts.incarnation
    before = num_sockets(over_tcp)
    for num_tried in range(1, 4):
        prefill.parts.loop.call_soon_threadsafe(prefill.connections.suspect, receiver, "a write has not arrived")
        await until(lambda n=num_tried: len(router.links) == 2 * n, "the trial")
    assert [link.is_broken for link in router.links] == [True, False] * 3
    (after,) = await router.ask(Ask(prompt_of(100, seed=7)))
    assert after.ids() == oracle.greedy(prompt_of(100, seed=7), 12)
    await over_tcp.settled()
    assert num_sockets(over_tcp) == before


@pytest.mark.parametrize("over_tcp", [CONFIG | {"transport": {"lease_s": 2.0}}], indirect=True)
async def test_a_write_that_was_overdue_and_has_ended_costs_no_connection(
    over_tcp: WorkerPair, router: Router, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the decode worker was stopped for longer than a lease."""
    await router.ask(Ask(prompt_of(60)))
    prefill, before = over_tcp.prefill, num_sockets(over_tcp)
    transport, withheld = prefill.parts.transfer._transport, list[Any]()
    poll, suspect, is_suspected = transport.poll, prefill.connections.suspect, [False]

    def poll_later() -> Any:
        events = [*withheld, *poll()]
        withheld[:] = [] if is_suspected[0] else [e for e in events if isinstance(e, WriteCompleted)]
        return [e for e in events if e not in withheld]

    def note_and_suspect(receiver: str, why: str) -> None:
        is_suspected[0] = True
        suspect(receiver, why)

    monkeypatch.setattr(transport, "poll", poll_later)
    monkeypatch.setattr(prefill.connections, "suspect", note_and_suspect)
    ask = await router.begin(Ask(prompt_of(200, seed=5)))
    await router.until(lambda: router.outcomes[ask.key].failures, "the failure", 60)
    outcome = await router.finish(await next_attempt(router, ask))
    assert outcome.ids() == oracle.greedy(ask.prompt, 12)
    await is_whole(over_tcp)
    await over_tcp.settled()
    assert is_suspected == [True]
    assert num_sockets(over_tcp) == before


@pytest.mark.parametrize("over_tcp", [CONFIG | {"transport": {"lease_s": 2.0}}], indirect=True)
async def test_a_write_that_hangs_for_a_request_that_was_cancelled_costs_a_connection_and_no_worker(
    over_tcp: WorkerPair, router: Router, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    await router.ask(Ask(prompt_of(60)))
    prefill, decode = over_tcp.prefill, over_tcp.decode
    transport = prefill.parts.transfer._transport
    poll, has_hung_up = transport.poll, [False]

    def poll_and_hear_of_no_end() -> Any:
        """Until the connection is closed: as of a link by which nothing comes."""
        events = poll()
        return events if has_hung_up[0] else [e for e in events if not isinstance(e, WriteCompleted)]

    hang_up = transport.hang_up

    def hang_up_and_hear_again(peer: PeerId) -> None:
        has_hung_up[0] = True
        hang_up(peer)

    monkeypatch.setattr(transport, "poll", poll_and_hear_of_no_end)
    monkeypatch.setattr(transport, "hang_up", hang_up_and_hear_again)
    with Gate(decode, "kill_writer") as kills:
        ask = await router.begin(Ask(prompt_of(200, seed=5)))
        await until(lambda: is_writing(prefill), "a write")
        await router.cancel(ask, "prefill", "decode")
        await until(lambda: has_hung_up[0], "the end of the connection", 60)
        await is_whole(over_tcp)
        await over_tcp.settled(60)
        assert kills.num_calls == 0
    (after,) = await router.ask(Ask(prompt_of(100, seed=7)))
    assert after.ids() == oracle.greedy(prompt_of(100, seed=7), 12)


async def test_an_attempt_gives_up_waiting_for_a_connection_that_stays_broken(
    over_tcp: WorkerPair, router: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    await router.ask(Ask(prompt_of(60)))
    prefill, decode = over_tcp.prefill, over_tcp.decode

    async def not_reached(*_: Any) -> None:
        raise WorkerLostError("no way there")

    monkeypatch.setattr(prefill.connections, "_patience_s", 0.2)
    with monkeypatch.context() as cut_off:
        cut_off.setattr(prefill.peers, "pair_again", not_reached)
        prefill.parts.loop.call_soon_threadsafe(prefill.connections.broke, decode.parts.incarnation, "cut off")
        await until(lambda: not prefill.connections.is_whole(decode.parts.incarnation), "the break")
        ask = await router.begin(Ask(prompt_of(70, seed=6)))
        await router.until(lambda: router.outcomes[ask.key].failures, "the failure", 60)
        error = router.outcomes[ask.key].failures["prefill"]
        assert (error.reason, error.retryable) == ("link_broken", True)
        await router.cancel(ask, "decode")
    await is_whole(over_tcp)
    await over_tcp.settled()
