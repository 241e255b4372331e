"""Pages that a silent writer may still write: what frees them, what does not, and what comes of too many."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from decode_worker.worker import DecodeWorker
from prefill_worker.worker import PrefillWorker
from tandem.core.errors import InternalError, TransportError
from tandem.core.sampling import SamplingParams
from tandem.rpc.channel import make_channel
from tandem.rpc.v1 import control_pb2, control_pb2_grpc, decode_pb2
from tests.support.scripted_router import Ask, Router
from tests.support.waiting import until
from tests.support.worker_pair import (
    CONFIG,
    SHARED_LOOP,
    Gate,
    Oracle,
    Stash,
    WorkerPair,
    make_worker,
    prompt_of,
)

pytest_plugins = ["tests.support.worker_pair"]
pytestmark = SHARED_LOOP

SHORT_LEASE_S = 0.5
NUM_PAGES = 64
FENCED = CONFIG | {"transport": {"name": "loopback", "lease_s": 5.0, "quarantine_cap": 0.5}}
# Without a grace time, pages above the cap count from their first moment in quarantine.
CAPPED = CONFIG | {"transport": FENCED["transport"] | {"grace_s": 0.0, "quarantine_cap": 3 / NUM_PAGES}}
CAPPED_BRIEFLY = CONFIG | {"transport": CAPPED["transport"] | {"lease_s": SHORT_LEASE_S}}
LONG = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)


def a_pair(model_dir: Path, config: dict[str, Any]) -> WorkerPair:
    prefill = make_worker(PrefillWorker, model_dir, NUM_PAGES, config)
    return WorkerPair(prefill, make_worker(DecodeWorker, model_dir, NUM_PAGES, config))


async def started(pair: WorkerPair) -> AsyncIterator[WorkerPair]:
    try:
        await asyncio.to_thread(pair.prefill_process.start)
        # Another host's, for all that decode knows: no pidfd tells of its end.
        pair.prefill.parts.info.host_id = "another boot/another namespace"
        await asyncio.to_thread(pair.decode_process.start)
        yield pair
    finally:
        await asyncio.to_thread(pair.stop)


@pytest_asyncio.fixture(loop_scope="session")
async def remote(worker_model_dir: Path) -> AsyncIterator[WorkerPair]:
    async for pair in started(a_pair(worker_model_dir, FENCED)):
        yield pair


@pytest_asyncio.fixture(loop_scope="session")
async def capped(worker_model_dir: Path) -> AsyncIterator[WorkerPair]:
    async for pair in started(a_pair(worker_model_dir, CAPPED)):
        yield pair


@pytest_asyncio.fixture(loop_scope="session")
async def capped_briefly(worker_model_dir: Path) -> AsyncIterator[WorkerPair]:
    async for pair in started(a_pair(worker_model_dir, CAPPED_BRIEFLY)):
        yield pair


@asynccontextmanager
async def silent_writer(pair: WorkerPair, router: Router) -> AsyncIterator[Ask]:
    """Prefill was to send four pages and answers nobody any more; the router has given the request up."""
    with Gate(pair.prefill.parts.engine, "forward"), Stash(pair.prefill, "confirm_idle") as stash:
        ask = await router.begin(Ask(prompt_of(60, seed=9)))
        await router.until_attached(ask)
        await router.cancel(ask, "decode")
        await until(lambda: pair.decode.driver._handoffs.num_quarantined_pages == 4, "the quarantine")
        await stash.wait()  # decode has asked it: there is a channel to it
        yield ask
        await router.cancel(ask, "prefill")


def num_quarantined(pair: WorkerPair) -> int:
    return pair.on_runner(pair.decode, pair.decode.parts.pool.counts).quarantined


async def note_ended(pair: WorkerPair, *incarnations: str) -> None:
    async with make_channel(pair.decode.parts.info.address) as channel:
        stub = control_pb2_grpc.WorkerControlStub(channel)
        await stub.NoteEnded(control_pb2.NoteEndedRequest(incarnations=incarnations), timeout=10)


# ---- what frees them


async def test_proof_of_the_writers_end_frees_its_pages_and_all_that_was_known_of_it(remote: WorkerPair) -> None:
    decode, incarnation = remote.decode, remote.prefill.parts.incarnation
    async with Router(remote) as router:
        async with silent_writer(remote, router):
            await note_ended(remote, "somebody-else", decode.parts.incarnation)
            assert num_quarantined(remote) == 4
            assert incarnation in decode._writers
            await note_ended(remote, incarnation)
            await until(lambda: not decode.driver._handoffs.num_quarantined_pages, "the fence")
            assert num_quarantined(remote) == 0
            assert not decode._writers
            assert not decode._channels
            await note_ended(remote, incarnation)
        await remote.settled()


async def test_who_has_ended_neither_pairs_nor_attaches_again(remote: WorkerPair) -> None:
    """Its calls may arrive behind the proof of its end."""
    decode, incarnation = remote.decode, remote.prefill.parts.incarnation
    async with Router(remote) as router:
        await router.ask(Ask(prompt_of(20)))
        await note_ended(remote, incarnation)
        stub = router.stub("decode")
        reply = await stub.Pair(decode_pb2.PairRequest(prefill=remote.prefill.parts.info), timeout=10)
        assert (reply.error.code, reply.error.retryable) == ("worker_lost", True)
        assert not decode._writers
        router.attaches = False
        ask = await router.reserve(Ask(prompt_of(21)))
        await router.heard(ask, "decode.granted")
        grant = router.outcomes[ask.key].grant
        assert grant is not None
        attach = decode_pb2.AttachRequest(
            grant_id=grant.grant_id, sender_incarnation=incarnation, capability=grant.capability
        )
        assert (await stub.Attach(attach, timeout=10)).error.reason == "writer_exited"
        await router.cancel(ask, "decode")
        await remote.settled()


async def test_who_ends_while_it_pairs_is_not_paired_with(remote: WorkerPair) -> None:
    decode, incarnation = remote.decode, remote.prefill.parts.incarnation
    transport = await asyncio.wrap_future(decode.parts.transfer.submit(lambda transport: transport))
    async with Router(remote) as router:
        with Gate(transport, "connect") as gate:
            pairing = asyncio.ensure_future(
                router.stub("decode").Pair(decode_pb2.PairRequest(prefill=remote.prefill.parts.info), timeout=10)
            )
            await gate.wait()
            await note_ended(remote, incarnation)
        assert (await pairing).error.code == "worker_lost"
        assert not decode._writers
        metadata = remote.prefill.parts.info.transport_metadata
        with pytest.raises(TransportError):  # the transport has forgotten it, and takes its name no more
            await asyncio.wrap_future(decode.parts.transfer.submit(lambda transport: transport.connect(metadata)))


async def test_a_new_process_under_the_writers_name_proves_nothing(
    remote: WorkerPair, worker_model_dir: Path, oracle: Oracle
) -> None:
    """The old one may run on, cut off, on another host."""
    successor = make_worker(PrefillWorker, worker_model_dir, NUM_PAGES, FENCED)
    await asyncio.to_thread(successor.start)
    try:
        async with Router(remote) as router, Router(WorkerPair(successor, remote.decode_process)) as after:
            async with silent_writer(remote, router):
                (outcome,) = await after.ask(Ask(prompt_of(60, seed=9)))
                assert outcome.ids() == oracle.greedy(prompt_of(60, seed=9), 12)
                assert num_quarantined(remote) == 4
                assert {w.worker_id for w in remote.decode._writers.values()} == {"prefill-0"}
                assert len(remote.decode._writers) == 2
            await remote.settled()
    finally:
        await asyncio.to_thread(successor.stop)


async def test_they_hold_no_drain(remote: WorkerPair) -> None:
    """When the process leaves, so does the memory that might be written."""
    async with Router(remote) as router, silent_writer(remote, router):
        await asyncio.wait_for(asyncio.to_thread(remote.decode_process.drain), 60)
        assert num_quarantined(remote) == 4


# ---- too many


async def test_above_the_cap_the_worker_drains_and_gives_itself_up(capped: WorkerPair, oracle: Oracle) -> None:
    async with Router(capped) as router:
        held = await router.begin(Ask(prompt_of(40), LONG))
        await router.heard(held, "decode.admitted")  # its pages have left prefill, which is held up next
        async with silent_writer(capped, router):
            late = await router.reserve(Ask(prompt_of(20)))
            await router.heard(late, "decode.failed")
            failure = router.outcomes[late.key].failures["decode"]
            assert (failure.code, failure.retryable) == ("draining", True)
            assert router.statuses["decode"].draining
            assert (await router.finish(held)).ids() == oracle.greedy(held.prompt, LONG.max_tokens)
            with pytest.raises(InternalError, match="4 pages are in quarantine"):
                await asyncio.to_thread(lambda: capped.decode_process.wait_closed(5))


async def test_what_does_not_end_is_lost_with_it(capped_briefly: WorkerPair) -> None:
    loop = asyncio.get_running_loop()
    async with Router(capped_briefly) as router:
        held = await router.begin(Ask(prompt_of(40), replace(LONG, max_tokens=400)))
        await router.heard(held, "decode.admitted")  # its pages have left prefill, which is held up next
        async with silent_writer(capped_briefly, router):
            began_s = loop.time()
            with (
                Gate(capped_briefly.decode.parts.engine, "forward"),
                pytest.raises(InternalError, match="4 pages are in quarantine"),
            ):
                await asyncio.to_thread(lambda: capped_briefly.decode_process.wait_closed(9))
            assert loop.time() - began_s < 8 * SHORT_LEASE_S
