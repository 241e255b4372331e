"""A request is cancelled, or its router goes away, at every point of its life: nothing of it is left anywhere."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace

import pytest

from tandem.core.sampling import SamplingParams
from tests.support.scripted_router import Ask, Router
from tests.support.waiting import until
from tests.support.worker_pair import SHARED_LOOP, Gate, HeldCommits, Oracle, Stash, WorkerPair, prompt_of

pytest_plugins = ["tests.support.worker_pair"]
pytestmark = SHARED_LOOP

# A point holds a request where its name says, for the length of a `with` block, and gives the request.
Point = Callable[[WorkerPair, Router], AbstractAsyncContextManager[Ask]]


def an_ask() -> Ask:
    return Ask(prompt_of(80), SamplingParams(temperature=0, max_tokens=40, ignore_eos=True), n=2)


@asynccontextmanager
async def queued_at_prefill(pair: WorkerPair, router: Router) -> AsyncIterator[Ask]:
    old = pair.limit(pair.prefill, max_num_seqs=0)
    try:
        ask = await router.begin(an_ask())
        await router.until_attached(ask)
        yield ask
    finally:
        pair.prefill.parts.scheduler.limits = old
        pair.on_runner(pair.prefill, lambda: None)


@asynccontextmanager
async def computing_the_second_chunk(pair: WorkerPair, router: Router) -> AsyncIterator[Ask]:
    with Gate(pair.prefill.parts.engine, "forward", first=1) as gate:
        ask = await router.begin(an_ask())
        await gate.wait()
        await router.until_attached(ask)
        yield ask


@asynccontextmanager
async def between_two_writes(pair: WorkerPair, router: Router) -> AsyncIterator[Ask]:
    with Stash(pair.prefill.driver, "_write", first=1) as stash:
        # Attached before anything is computed, or all would go as one write.
        with Gate(pair.prefill.parts.engine, "forward"):
            ask = await router.begin(an_ask())
            await router.until_attached(ask)
        await stash.wait()
        yield ask


@asynccontextmanager
async def written_and_not_committed(pair: WorkerPair, router: Router) -> AsyncIterator[Ask]:
    with HeldCommits(pair.prefill) as stash:
        ask = await router.begin(an_ask())
        await stash.wait()
        yield ask


@asynccontextmanager
async def committed_and_not_acknowledged(pair: WorkerPair, router: Router) -> AsyncIterator[Ask]:
    with Stash(pair.prefill, "_take_answer") as stash:
        ask = await router.begin(an_ask())
        await router.heard(ask, "decode.admitted")
        await stash.wait()
        yield ask


@asynccontextmanager
async def waiting_for_pages(pair: WorkerPair, router: Router) -> AsyncIterator[Ask]:
    with pair.hogged(pair.decode, num_free=2):
        ask = await router.begin(an_ask())
        await until(lambda: pair.prefill.parts.scheduler.parked, "a computed prompt")
        assert not router.outcomes[ask.key].grant
        yield ask


@asynccontextmanager
async def granted(pair: WorkerPair, router: Router) -> AsyncIterator[Ask]:
    router.attaches = False
    ask = await router.begin(an_ask())
    await router.heard(ask, "decode.granted")
    yield ask


@asynccontextmanager
async def attached(pair: WorkerPair, router: Router) -> AsyncIterator[Ask]:
    with Gate(pair.prefill.parts.engine, "forward") as gate:
        ask = await router.begin(an_ask())
        await gate.wait()
        await router.until_attached(ask)
        yield ask


def computed_at_decode(first: int) -> Point:
    @asynccontextmanager
    async def held(pair: WorkerPair, router: Router) -> AsyncIterator[Ask]:
        with Gate(pair.decode.parts.engine, "forward", first=first) as gate:
            ask = await router.begin(an_ask())
            await gate.wait()
            yield ask

    return held


def computing_its_prompt_at_decode(first: int) -> Point:
    """Prefill has no part in it; held at a chunk of the prompt, or at a step behind it."""

    @asynccontextmanager
    async def held(pair: WorkerPair, router: Router) -> AsyncIterator[Ask]:
        with Gate(pair.decode.parts.engine, "forward", first=first) as gate:
            ask = await router.reserve(replace(an_ask(), local=512))
            await gate.wait()
            yield ask

    return held


@asynccontextmanager
async def waiting_to_compute_at_decode(pair: WorkerPair, router: Router) -> AsyncIterator[Ask]:
    with pair.hogged(pair.decode, num_free=2):
        ask = await router.reserve(replace(an_ask(), local=512))
        await until(lambda: pair.decode.core.ledger.waiting, "a reservation")
        yield ask


POINTS: dict[str, Point] = {
    "queued": queued_at_prefill,
    "computing": computing_the_second_chunk,
    "writing": between_two_writes,
    "written": written_and_not_committed,
    "committed": committed_and_not_acknowledged,
    "waiting for pages": waiting_for_pages,
    "granted": granted,
    "attached": attached,
    "admitted": computed_at_decode(0),
    "decoding": computed_at_decode(4),
    "waiting to compute at decode": waiting_to_compute_at_decode,
    "first chunk at decode": computing_its_prompt_at_decode(0),
    "last chunk at decode": computing_its_prompt_at_decode(2),
    "computed at decode": computing_its_prompt_at_decode(4),
}


@pytest.mark.parametrize("point", POINTS.values(), ids=POINTS)
@pytest.mark.parametrize("order", [("prefill", "decode"), ("decode", "prefill")], ids="-".join)
async def test_a_cancel(pair: WorkerPair, point: Point, order: tuple[str, str]) -> None:
    async with Router(pair) as router:
        async with point(pair, router) as ask:
            await router.cancel(ask, *order)
            await router.cancel(ask, *order)
        await pair.settled()


@pytest.mark.parametrize("point", POINTS.values(), ids=POINTS)
async def test_the_router_goes_away(pair: WorkerPair, point: Point) -> None:
    async with Router(pair) as router:
        async with point(pair, router):
            router.close("prefill")
            router.close("decode")
        await pair.settled()


@pytest.mark.parametrize("name", [name for name in POINTS if name not in ("committed", "admitted", "decoding")])
@pytest.mark.parametrize("lost", ["prefill", "decode"])
async def test_one_stream_breaks(pair: WorkerPair, name: str, lost: str) -> None:
    """The other worker's router cancels there, as it does when it has lost the first one."""
    other = "decode" if lost == "prefill" else "prefill"
    async with Router(pair) as router:
        async with POINTS[name](pair, router) as ask:
            router.close(lost)
            with contextlib.suppress(AssertionError):
                await router.cancel(ask, other)
        await pair.settled()


async def test_others_do_not_notice(pair: WorkerPair, oracle: Oracle) -> None:
    """One of three requests in the same batches is cancelled at decode, one at prefill."""
    async with Router(pair) as router:
        asks = [Ask(prompt_of(100, seed=n)) for n in range(4)]
        with Gate(pair.prefill.parts.engine, "forward", first=1) as gate:
            for ask in asks:
                await router.begin(ask)
            await gate.wait()
            await router.cancel(asks[1])
            gate.open()
            with Gate(pair.decode.parts.engine, "forward", first=2) as second:
                await second.wait()
                await router.cancel(asks[2])
        for ask in (asks[0], asks[3]):
            assert (await router.finish(ask)).ids() == oracle.greedy(ask.prompt, 12)


async def test_a_prompt_refused_after_its_handoff_failed_harms_nobody(pair: WorkerPair, oracle: Oracle) -> None:
    """Attached while prefill is in a long step, dropped by decode, and then refused because prefill drains."""
    async with Router(pair) as router:
        with Gate(pair.prefill.parts.engine, "forward") as gate:
            busy = await router.begin(Ask(prompt_of(30)))
            await gate.wait()
            ask = await router.begin(an_ask())
            await router.until_attached(ask)
            pair.prefill.parts.life.draining = True
            await router.cancel(ask, "decode")
            await until(lambda: ask.key not in pair.prefill.driver._entries, "the end of the handoff")
            gate.open()
            await router.until(lambda: "prefill" in router.outcomes[ask.key].failures, "the refusal")
            pair.prefill.parts.life.draining = False
        assert (await router.finish(busy)).ids() == oracle.greedy(busy.prompt, 12)
        after = await router.begin(Ask(prompt_of(50)))
        assert (await router.finish(after)).ids() == oracle.greedy(after.prompt, 12)
