"""Connections that break, also while they are made anew: the code of both ends, over loopback transports in threads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from decode_worker.links import WriterLinks
from kvtransfer.extents import Descriptor
from kvtransfer.transfer_thread import TransferThread
from kvtransfer.transports.base import Transport
from kvtransfer.transports.events import (
    Greeting,
    GreetingArrived,
    LinkBroken,
    PeerId,
    ThreadEvent,
    WriteCompleted,
    WriteFailed,
)
from kvtransfer.transports.loopback import FaultPlan, LoopbackNetwork, LoopbackTransport
from prefill_worker.connections import Connections
from prefill_worker.links import LinkFigures
from prefill_worker.peers import Peer
from tandem.core.errors import HandoffError, WorkerLostError
from tests.support.waiting import until

PREFILL, DECODE = "prefill-0#1", "decode-0#1"
LEASE_S = 20.0


class End:
    """A worker's transport in its thread."""

    def __init__(self, name: str, network: LoopbackNetwork) -> None:
        self.transport = LoopbackTransport(name, network=network)
        self.arena = np.zeros(64, np.uint8)
        self.transport.register(self.arena.ctypes.data, self.arena.nbytes, owner=self.arena)
        self.metadata = self.transport.metadata()
        self.errors: list[BaseException] = []
        self.thread = TransferThread(self.transport, self.heard, self.errors.append, idle_poll_s=0.01)
        self.loop = asyncio.get_running_loop()
        self.thread.start()

    def heard(self, event: ThreadEvent) -> None:
        raise NotImplementedError

    def stop(self) -> None:
        self.thread.stop()
        assert not self.errors


class DecodeEnd(End):
    """As a decode worker answers the calls of `DecodePeers`."""

    def __init__(self, network: LoopbackNetwork, prefill: PrefillEnd) -> None:
        super().__init__(DECODE, network)
        self.links = WriterLinks(self.thread.submit)
        self.prefill = prefill
        self.num_closed = 0
        self.before_pairing: list[Callable[[], None]] = []  # of these, one each time that it is paired with again
        self.before_answering: list[Callable[[], None]] = []  # likewise, each time that its connection is tried

    def heard(self, event: ThreadEvent) -> None:
        if isinstance(event, GreetingArrived):
            self.loop.call_soon_threadsafe(self.links.greeted, event.peer, event.greeting)

    def _closed(self) -> None:
        self.num_closed += 1

    async def pair(self, number: int) -> None:
        await self.links.connect(PREFILL, number, self.prefill.metadata, self._closed)

    async def pair_again(self, _: Any, number: int) -> None:
        if self.before_pairing:
            self.before_pairing.pop(0)()
        await self.pair(number)

    async def await_greeting(self, _: Any, greeting: Greeting, timeout_s: float) -> bool:
        return await self.links.await_greeting(PREFILL, greeting, min(timeout_s, 0.3))

    async def reopen_commits(self, _: Any) -> None:
        if self.before_answering:
            self.before_answering.pop(0)()


class PrefillEnd(End):
    """As a prefill worker has its connections; `told` is what routers hear."""

    def __init__(self, network: LoopbackNetwork) -> None:
        super().__init__(PREFILL, network)
        self.told: list[bool] = []
        self.num_closed = 0
        self.num_drains = 0
        self.are_drained = asyncio.Event()
        self.are_drained.set()
        self.ends: asyncio.Queue[WriteCompleted | WriteFailed] = asyncio.Queue()
        self.tasks: set[asyncio.Task[None]] = set()
        self.after_command: list[Callable[[], None]] = []  # of these, one after each that the connections give

    def heard(self, event: ThreadEvent) -> None:
        if isinstance(event, LinkBroken):
            self.loop.call_soon_threadsafe(self.connections.broke, event.peer, event.error)
        if isinstance(event, WriteCompleted | WriteFailed):
            self.loop.call_soon_threadsafe(self.ends.put_nowait, event)

    def begin(self, decode: DecodeEnd) -> None:
        self.connections = Connections(decode, self, LEASE_S)  # type: ignore[arg-type]
        info = SimpleNamespace(incarnation=DECODE, worker_id="decode-0", transport_metadata=decode.metadata)
        self.peer = cast(Peer, SimpleNamespace(info=info, name=PeerId(DECODE)))
        self.connections.begin(self.peer)

    # -- `Calls`

    def ask_transport(self, command: Callable[[Transport], Any]) -> Awaitable[Any]:
        asked: Future[Any] = self.thread.submit(command)
        if self.after_command:
            then = self.after_command.pop(0)
            asked.add_done_callback(lambda _: then())
        return asyncio.wrap_future(asked)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    def link_changed(self, peer: Any, *, is_broken: bool) -> None:
        self.told.append(is_broken)

    def link_closed(self, receiver: str) -> None:
        assert receiver == DECODE
        self.num_closed += 1

    async def drained(self, receiver: str) -> None:
        assert receiver == DECODE
        self.num_drains += 1
        await self.are_drained.wait()

    async def write(self) -> WriteCompleted | WriteFailed:
        self.thread.write(PeerId(DECODE), [Descriptor(0, 0, 8)], b"tag")
        return await asyncio.wait_for(self.ends.get(), 60)


def not_reached() -> None:
    raise WorkerLostError("no way there")


class Site:
    def __init__(self) -> None:
        self.network = LoopbackNetwork()
        self.prefill = PrefillEnd(self.network)
        self.decode = DecodeEnd(self.network, self.prefill)

    def cut(self) -> None:
        self.network.cut(PREFILL, DECODE)

    def cut_and_notice(self) -> None:
        """A commit is about to be sent."""
        self.cut()
        self.prefill.thread.submit(lambda transport: transport.send(PeerId(DECODE), b"a commit"))

    async def is_told(self, *is_broken: bool) -> None:
        await until(lambda: self.prefill.told == [*is_broken], "the news")

    async def is_up(self) -> None:
        await until(lambda: not self.prefill.tasks, "the end of all that is under way")
        assert self.prefill.connections.is_whole(DECODE)
        assert isinstance(await self.prefill.write(), WriteCompleted)
        assert not self.prefill.transport._expected
        await until(lambda: not self.decode.transport._expected, "the end of all greetings at decode")


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    site = Site()
    await site.decode.pair(0)
    site.prefill.transport.connect(site.decode.metadata)
    site.prefill.begin(site.decode)
    await site.prefill.connections.wait_greeted(DECODE)
    await site.is_up()
    yield site
    for task in site.prefill.tasks:
        task.cancel()
    site.prefill.stop()
    site.decode.stop()


async def test_a_connection_that_breaks_is_made_anew_and_routers_hear_both(site: Site) -> None:
    site.cut()
    failed = await site.prefill.write()
    assert isinstance(failed, WriteFailed)
    assert failed.is_link_broken
    await until(lambda: site.prefill.told, "the news")
    await site.is_up()
    assert site.prefill.told == [True, False]
    assert (site.prefill.num_closed, site.decode.num_closed) == (1, 1)


async def test_one_that_only_seemed_broken_and_carries_is_kept(site: Site) -> None:
    """Tried once, however often that is said meanwhile, and each time anew."""
    for num_tried in (1, 2):
        for _ in range(3):
            site.prefill.connections.suspect(DECODE, "its stream of commits has ended")
        await until(lambda n=num_tried: len(site.prefill.told) == 2 * n, "the news")
        await site.is_up()
        assert site.prefill.told == [True, False] * num_tried
    assert (site.prefill.num_closed, site.decode.num_closed) == (0, 0)


@pytest.mark.long
@pytest.mark.parametrize("is_silent", [True, False])
async def test_one_that_does_not_carry_although_its_peer_answers_is_made_anew(site: Site, is_silent: bool) -> None:
    """Also where nobody says so, and it did carry when it was tried before."""
    site.prefill.connections.suspect(DECODE, "its stream of commits has ended")
    await site.is_told(True, False)
    if is_silent:
        site.prefill.transport.faults = FaultPlan(lose_messages=True)
    else:
        site.cut()
    site.decode.before_pairing = [lambda: setattr(site.prefill.transport, "faults", FaultPlan())]
    site.prefill.connections.suspect(DECODE, "a write has not arrived")
    await site.is_told(True, False, True, False)
    await site.is_up()
    assert (site.prefill.num_closed, site.decode.num_closed) == (1, 1)


@pytest.mark.long
async def test_nothing_is_closed_before_a_peer_that_was_stopped_answers(site: Site) -> None:
    """What it would find then is a connection that carries."""
    site.decode.before_answering = [not_reached] * 3
    site.prefill.connections.suspect(DECODE, "a write has not arrived")
    await site.is_told(True, False)
    assert not site.decode.before_answering
    await site.is_up()
    assert (site.prefill.num_closed, site.decode.num_closed) == (0, 0)


async def test_one_that_breaks_while_its_peer_does_not_answer_is_closed_at_once(site: Site) -> None:
    def breaks() -> None:
        site.prefill.connections.broke(DECODE, "reset")
        not_reached()

    site.decode.before_answering = [breaks, not_reached]
    site.prefill.connections.suspect(DECODE, "its stream of commits has ended")
    await site.is_told(True, False)
    assert (site.prefill.num_closed, site.decode.num_closed) == (1, 1)
    assert site.decode.before_answering, "it was tried no more"


@pytest.mark.long
async def test_one_by_which_a_write_still_hangs_is_made_anew_although_it_carries(site: Site) -> None:
    site.prefill.are_drained.clear()
    site.prefill.connections.suspect(DECODE, "a write has not arrived")
    await site.is_told(True, False)
    await site.is_up()
    assert (site.prefill.num_closed, site.decode.num_closed) == (1, 1)


@pytest.mark.long
@pytest.mark.parametrize("breaks", [True, False])
async def test_what_happens_while_it_is_tried_counts(site: Site, breaks: bool) -> None:
    """A break makes it anew; where another write hangs, that one is waited for too."""
    site.prefill.are_drained.clear()
    site.prefill.connections.suspect(DECODE, "a write has not arrived")
    await until(lambda: site.prefill.num_drains == 1, "a trial")
    if breaks:
        site.prefill.connections.broke(DECODE, "reset")
    else:
        site.prefill.connections.suspect(DECODE, "another write has not arrived")
    site.prefill.are_drained.set()
    await site.is_told(True, False)
    await site.is_up()
    assert (site.prefill.num_drains, site.prefill.num_closed) == ((1, 1) if breaks else (2, 0))


async def test_nobody_hears_that_a_connection_is_up_to_a_peer_that_ended_while_it_was_tried(site: Site) -> None:
    site.prefill.are_drained.clear()
    site.prefill.connections.suspect(DECODE, "a write has not arrived")
    await until(lambda: site.prefill.num_drains == 1, "a trial")
    site.prefill.connections.forget(DECODE)
    site.prefill.are_drained.set()
    await until(lambda: not site.prefill.tasks, "the end of the trial")
    assert site.prefill.told == [True]


async def test_where_nobody_greets_it_is_not_tried_but_made_anew(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LoopbackTransport, "greets", False)
    site.decode.before_answering = [not_reached]
    site.prefill.connections.suspect(DECODE, "a write has not arrived")
    await site.is_told(True, False)
    assert site.decode.before_answering, "decode would have been asked to expect something"
    assert (site.prefill.num_closed, site.decode.num_closed) == (1, 1)


async def test_one_that_breaks_as_it_is_tried_is_made_anew(site: Site) -> None:
    site.decode.before_answering = [site.cut_and_notice]
    site.prefill.connections.suspect(DECODE, "its stream of commits has ended")
    await site.is_told(True, False)
    await site.is_up()
    assert (site.prefill.num_closed, site.decode.num_closed) == (1, 1)


@pytest.mark.parametrize("is_noticed", [False, True])
@pytest.mark.parametrize("after", range(5))
async def test_one_that_breaks_again_at_any_moment_while_it_is_made_anew_is_up_in_the_end(
    site: Site, after: int, is_noticed: bool
) -> None:
    """Hang up, connect, greet, end of the greeting, open: after each of these commands."""
    nothing = [lambda: None] * after
    site.prefill.after_command = [*nothing, site.cut_and_notice if is_noticed else site.cut]
    site.cut()
    assert isinstance(await site.prefill.write(), WriteFailed)
    await until(lambda: not site.prefill.after_command, "the second break")
    for _ in range(3):  # one that nobody has noticed yet shows with the next write
        await until(lambda: not site.prefill.tasks, "the end of all that is under way")
        if isinstance(await site.prefill.write(), WriteCompleted):
            break
    await site.is_up()
    assert site.prefill.told[-1] is False
    assert site.prefill.num_closed >= site.decode.num_closed


async def test_who_waits_for_a_connection_goes_on_when_its_peer_has_ended(site: Site) -> None:
    """The next call finds that it is gone."""
    connections, waiting = site.prefill.connections, list[asyncio.Task[None]]()

    def ends() -> None:
        waiting.append(asyncio.create_task(connections.wait_whole(site.prefill.peer)))
        site.prefill.loop.call_later(0.01, connections.forget, DECODE)
        raise WorkerLostError("no way there")

    site.decode.before_pairing = [ends]
    site.cut()
    assert isinstance(await site.prefill.write(), WriteFailed)
    await until(lambda: waiting, "whoever waits")
    await asyncio.wait_for(waiting[0], 60)
    await until(lambda: not site.prefill.tasks, "the end of all tries")
    with pytest.raises(WorkerLostError):
        await connections.wait_whole(site.prefill.peer)


@pytest.mark.long
async def test_a_peer_that_cannot_be_reached_is_tried_until_it_can(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(site.prefill.connections, "_patience_s", 0.02)
    site.decode.before_pairing = [not_reached] * 2
    site.cut()
    assert isinstance(await site.prefill.write(), WriteFailed)
    await until(lambda: not site.prefill.connections.is_whole(DECODE), "the break")
    with pytest.raises(HandoffError, match="broke and is not up again"):
        await site.prefill.connections.wait_whole(site.prefill.peer)
    await until(lambda: not site.decode.before_pairing, "two tries")
    assert site.prefill.num_closed == 0, "nothing is settled before decode knows"
    await site.is_up()


async def test_routers_hear_of_what_is_broken_in_each_report_also_where_nothing_was_sent_lately(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the links that were used last have figures; a router takes what a report does not name for whole."""
    connections = site.prefill.connections

    def report(*figures: LinkFigures) -> list[tuple[str, str, float, bool]]:
        told = connections.report(figures)
        return [(link.worker_id, link.incarnation, link.bytes_per_s, link.is_broken) for link in told]

    assert report() == []
    assert report(LinkFigures(DECODE, 5.0), LinkFigures("gone#1", 7.0)) == [("decode-0", DECODE, 5.0, False)]
    is_reachable = asyncio.Event()
    pair = site.decode.pair

    async def pair_later(number: int) -> None:
        await is_reachable.wait()
        await pair(number)

    monkeypatch.setattr(site.decode, "pair", pair_later)
    site.cut()
    assert isinstance(await site.prefill.write(), WriteFailed)
    await until(lambda: not connections.is_whole(DECODE), "the break")
    assert report() == [("decode-0", DECODE, 0.0, True)]
    assert report(LinkFigures(DECODE, 5.0)) == [("decode-0", DECODE, 5.0, True)]
    is_reachable.set()
    await site.is_up()
    assert report() == []
