"""Calls to decode workers that end while they are called: each is an answer, none a defect of this worker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import pytest

from kvtransfer.layout import LayoutId
from kvtransfer.protocol.messages import AttemptKey, Grant
from kvtransfer.protocol.sender_events import ConfirmIdle
from kvtransfer.transports.events import Greeting, PeerId
from kvtransfer.wire import layout_to_proto, protocols_to_proto
from prefill_worker.peers import DecodePeers, Peer
from tandem.core.errors import WorkerLostError
from tandem.core.protocols import Protocols
from tandem.rpc.v1 import common_pb2 as pb
from tandem.rpc.v1 import decode_pb2 as decode_pb
from tests.support.scripted_worker import ScriptedDecode
from tests.support.waiting import until

LAYOUT = LayoutId("ab" * 32, "float32", num_layers=2, num_kv_heads=1, head_dim=2, page_size=4)
KEY = AttemptKey("request", 1)
WAIT_S = 60.0


@dataclass
class Site:
    decode: ScriptedDecode
    closing: list[asyncio.Task[None]] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    unreached: list[tuple[str, str]] = field(default_factory=list)  # (who, why)
    answers: asyncio.Queue[tuple[str, str]] = field(default_factory=asyncio.Queue)  # (who, of which request)

    def make(
        self, paired: Callable[[DecodePeers, Peer], None] = lambda _peers, _peer: None, call_timeout_s: float = 60
    ) -> DecodePeers:
        def lose(peer: Peer) -> None:
            self.lost.append(peer.info.incarnation)
            self.closing.append(asyncio.create_task(peer.close()))

        async def connect(_: bytes) -> PeerId:
            return PeerId(self.decode.info.incarnation)

        mine = pb.WorkerInfo(
            worker_id="prefill-0", incarnation="prefill-0#1", transport="ucx", layout=layout_to_proto(LAYOUT),
            protocols=protocols_to_proto(Protocols()),
        )  # fmt: skip
        peers = DecodePeers(
            mine,
            connect,
            lambda peer: paired(peers, peer),
            lose,
            lambda receiver, answer: self.answers.put_nowait((receiver, answer.request_id)),
            lambda receiver, why: self.unreached.append((receiver, why)),
            call_timeout_s=call_timeout_s,
            confirm_for_s=60,
        )
        return peers


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    decode = ScriptedDecode("decode-0")
    decode.hangs = True
    decode.info = describe(decode.port, "decode-0#1")
    site = Site(decode)
    yield site
    await asyncio.gather(*site.closing)
    await asyncio.to_thread(decode.kill)


def describe(port: int, incarnation: str) -> pb.WorkerInfo:
    return pb.WorkerInfo(
        worker_id="decode-0",
        incarnation=incarnation,
        address=f"127.0.0.1:{port}",
        layout=layout_to_proto(LAYOUT),
        transport="ucx",
        num_pages=4,
        protocols=protocols_to_proto(Protocols()),
    )


def a_grant() -> Grant:
    return Grant("decode-0#1/1", KEY, 1, "decode-0#1", LAYOUT, (1,), 10.0, capability=b"given")


def a_call(request_id: str) -> decode_pb.CommitCall:
    return decode_pb.CommitCall(commit=decode_pb.Commit(request_id=request_id))


async def answer(site: Site) -> tuple[str, str]:
    return await asyncio.wait_for(site.answers.get(), WAIT_S)


async def test_a_process_that_ends_between_its_answer_and_the_look_at_it_is_no_peer(site: Site) -> None:
    peers = site.make(paired=lambda peers, peer: peers.ended(peer.info.incarnation))
    with pytest.raises(WorkerLostError, match="has ended since"):
        await peers.get(site.decode.info)
    assert site.lost == ["decode-0#1"]
    with pytest.raises(WorkerLostError, match="has ended"):
        await peers.get(site.decode.info)


@pytest.mark.parametrize("is_closed", [False, True])
async def test_a_call_to_a_peer_that_has_ended_says_so(site: Site, is_closed: bool) -> None:
    """Whoever renews a lease still has the peer."""
    peers = site.make()
    peer = await peers.get(site.decode.info)
    peers.ended(peer.info.incarnation)
    if is_closed:
        await asyncio.gather(*site.closing)
    with pytest.raises(WorkerLostError):
        await peers.attach(peer, a_grant(), renew=True)


async def test_a_channel_that_is_closed_before_its_end_is_known_fails_a_call_as_lost(site: Site) -> None:
    peers = site.make()
    peer = await peers.get(site.decode.info)
    await peer.channel.close(grace=None)
    with pytest.raises(WorkerLostError, match="attach to decode-0"):
        await peers.attach(peer, a_grant(), renew=True)


async def test_a_call_under_way_ends_when_its_peer_does(site: Site) -> None:
    peers = site.make()
    peer = await peers.get(site.decode.info)
    call = asyncio.create_task(peers.attach(peer, a_grant(), renew=False))
    await until(site.decode.called.is_set, "the call")
    peers.ended(peer.info.incarnation)
    await asyncio.wait([call], timeout=WAIT_S)
    assert isinstance(call.exception(), WorkerLostError), "not cancelled: somebody waits for the answer"


async def test_a_call_that_is_cancelled_is_cancelled(site: Site) -> None:
    peers = site.make()
    call = asyncio.create_task(peers.attach(await peers.get(site.decode.info), a_grant(), renew=False))
    await until(site.decode.called.is_set, "the call")
    call.cancel()
    peers.ended("decode-0#1")
    await asyncio.wait([call], timeout=WAIT_S)
    assert call.cancelled()


@pytest.mark.long
async def test_a_confirmation_ends_when_nobody_is_left_to_hear_it(site: Site) -> None:
    """A drain waits for it."""
    peers = site.make()
    await peers.get(site.decode.info)
    idle = ConfirmIdle(KEY, "decode-0#1/1", "decode-0#1", b"given")
    confirming = asyncio.create_task(peers.confirm_idle(idle))
    await until(site.decode.called.is_set, "the call")
    peers.ended("decode-0#1")
    await asyncio.wait([confirming], timeout=WAIT_S)
    assert confirming.result() is None


async def test_a_new_incarnation_proves_nothing_about_an_older_one(site: Site) -> None:
    peers = site.make()
    old = await peers.get(site.decode.info)
    site.decode.info = describe(int(old.info.address.rpartition(":")[2]), "decode-0#2")
    await peers.get(site.decode.info)
    assert site.lost == []
    assert set(peers.peers) == {"decode-0#1", "decode-0#2"}
    await peers.close()


# -- the stream of commits


async def test_a_peer_knows_where_its_answers_go_before_anything_is_sent_to_it(site: Site) -> None:
    peers = site.make()
    peer = await peers.get(site.decode.info)
    assert peer.commits.is_open
    assert site.decode.opened_by == ["prefill-0#1"]
    await peers.close()
    assert not peer.commits.is_open


@pytest.mark.long
async def test_a_peer_that_does_not_take_the_stream_is_none(site: Site) -> None:
    site.decode.knows_streams = False
    peers = site.make(call_timeout_s=0.2)
    with pytest.raises(WorkerLostError, match=r"commits to decode-0: no answer in 0\.2 s"):
        await asyncio.wait_for(peers.get(site.decode.info), WAIT_S)
    assert peers.peers == {}


async def test_commits_share_one_stream_and_answers_tell_who_gives_them(site: Site) -> None:
    peers = site.make()
    stream = (await peers.get(site.decode.info)).commits
    for name in ("a", "b"):
        stream.put(a_call(name))
    assert [await answer(site), await answer(site)] == [("decode-0#1", "a"), ("decode-0#1", "b")]
    assert site.decode.num_streams == 1
    await peers.close()


async def test_a_stream_that_breaks_is_not_open_and_the_next_commit_opens_another(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    peers = site.make()
    stream = (await peers.get(site.decode.info)).commits
    site.decode.broken.set()
    stream.put(a_call("lost"))
    await until(lambda: stream._running is None, "the end of the stream")
    assert not stream.is_open
    assert "commits to decode-0: broken; what is unanswered is asked again" in caplog.text
    assert site.unreached == [("decode-0#1", "commits to decode-0: broken")]
    site.decode.broken.clear()
    stream.put(a_call("again"))
    assert await answer(site) == ("decode-0#1", "again")
    assert stream.is_open
    assert site.decode.num_streams == 2
    await peers.close()
    assert len(site.unreached) == 1, "who closes it knows"


async def test_a_stream_that_ends_leaves_no_task(site: Site) -> None:
    peers = site.make()
    before = asyncio.all_tasks()
    stream = (await peers.get(site.decode.info)).commits
    stream.put(a_call("a"))
    await answer(site)
    of_stream = asyncio.all_tasks() - before
    site.decode.broken.set()
    stream.put(a_call("b"))
    _, left = await asyncio.wait(of_stream, timeout=WAIT_S)
    assert left == set()
    await peers.close()


async def test_a_stream_that_is_closed_before_it_begins_is_not_opened(site: Site) -> None:
    peers = site.make()
    stream = (await peers.get(site.decode.info)).commits
    await stream.close()
    with pytest.raises(WorkerLostError, match="commits to decode-0: the connection has been closed"):
        await stream.open()
    stream.put(a_call("a"))
    assert stream._running is None
    await peers.close()
    assert site.decode.num_streams == 1


async def test_a_stream_that_is_closed_while_it_opens_fails_as_lost(site: Site) -> None:
    peers = site.make()
    stream = (await peers.get(site.decode.info)).commits
    site.decode.broken.set()
    stream.put(a_call("a"))
    await until(lambda: stream._running is None, "the end of the stream")
    opening = asyncio.create_task(stream.open())
    closing = asyncio.create_task(stream.close())  # ends it before its task has begun
    with pytest.raises(WorkerLostError, match="the stream ended"):
        await asyncio.wait_for(opening, WAIT_S)
    await closing
    await peers.close()


async def test_a_channel_that_is_closed_before_its_end_is_known_breaks_the_stream_as_lost(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    peers = site.make()
    peer = await peers.get(site.decode.info)
    await peer.channel.close(grace=None)
    await until(lambda: peer.commits._running is None, "the end of the stream")
    with pytest.raises(WorkerLostError, match="commits to decode-0"):
        await asyncio.wait_for(peer.commits.open(), WAIT_S)


async def test_whoever_pairs_again_hears_of_the_next_break_too(site: Site) -> None:
    """While nothing is sent: else the first handoff after it would find out, by hanging."""
    peers = site.make()
    peer = await peers.get(site.decode.info)
    site.decode.broken.set()
    peer.commits.put(a_call("lost"))
    await until(lambda: site.unreached, "the end of the stream")
    await peers.pair_again(peer, 1)
    assert peer.commits.is_open
    await asyncio.to_thread(site.decode.kill)
    await until(lambda: len(site.unreached) == 2, "the end of the next stream")
    await peers.close()


@pytest.mark.parametrize("knows_trials", [True, False])
async def test_an_older_decode_worker_proves_no_trial_of_a_connection(site: Site, knows_trials: bool) -> None:
    """Of each it says that the connection has come up, once."""
    peers = site.make()
    peer = await peers.get(site.decode.info)
    site.decode.knows_trials = knows_trials
    assert await peers.await_greeting(peer, Greeting(0), 0.0)
    assert await peers.await_greeting(peer, Greeting(0, trial=2), 0.0) is knows_trials
    await peers.close()
