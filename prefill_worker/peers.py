"""The decode workers that this worker sends to: pairing, and the calls of a handoff. Lives in the event loop."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

import grpc
from grpc import aio

from kvtransfer.extents import ArenaShape
from kvtransfer.layout import LayoutId
from kvtransfer.protocol.messages import Grant
from kvtransfer.protocol.sender_events import ConfirmIdle
from kvtransfer.transports.events import Greeting, PeerId
from kvtransfer.wire import check_pair, kv_format
from prefill_worker.commit_stream import CommitStream
from tandem.core.errors import TandemError, WorkerLostError
from tandem.core.remembered import Remembered
from tandem.rpc.channel import make_channel
from tandem.rpc.convert import error_from_proto, error_from_rpc
from tandem.rpc.v1 import common_pb2 as pb
from tandem.rpc.v1 import decode_pb2 as decode_pb
from tandem.rpc.v1 import decode_pb2_grpc

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

# How often decode is told that nothing is outstanding, while it does not answer.
_CONFIRM_EVERY_S = 1.0
# Incarnations that ended and are remembered: a membership that is late may still name them.
_NUM_REMEMBERED = 256


@dataclass(frozen=True)
class Peer:
    """One incarnation of a decode worker with which this worker has paired."""

    info: pb.WorkerInfo
    name: PeerId
    layout: LayoutId
    protocol: int  # the number that both speak
    shape: ArenaShape
    channel: aio.Channel
    stub: decode_pb2_grpc.DecodeServiceAsyncStub
    commits: CommitStream

    async def close(self) -> None:
        """End its calls and the connection."""
        await self.commits.close()
        await self.channel.close(grace=None)


class DecodePeers:
    """Pairs with decode workers on first use.

    Args:
        info: this worker's own description.
        connect: makes the transport know a peer by its metadata.
        paired: called with each new peer, which has just spoken to us.
        lost: called when an incarnation is known to have ended.
        answered: called with a decode worker's incarnation and each of its answers to commits.
        unreached: called with a decode worker's incarnation, and why, when it cannot be reached any more. It may live.
        call_timeout_s: for one call to decode, in seconds.
        confirm_for_s: how long decode is told that nothing is outstanding; after that it asks by itself.
    """

    def __init__(
        self,
        info: pb.WorkerInfo,
        connect: Callable[[bytes], Awaitable[PeerId]],
        paired: Callable[[Peer], None],
        lost: Callable[[Peer], None],
        answered: Callable[[str, decode_pb.CommitAnswer], None],
        unreached: Callable[[str, str], None],
        *,
        call_timeout_s: float,
        confirm_for_s: float,
    ) -> None:
        self._info = info
        self._connect = connect
        self._paired = paired
        self._lost = lost
        self._answered = answered
        self._unreached = unreached
        self._timeout_s = call_timeout_s
        self._confirm_for_s = confirm_for_s
        self._ended = Remembered[str](_NUM_REMEMBERED)
        self._pairing: dict[str, asyncio.Task[Peer]] = {}
        # By incarnation. Written in the event loop, read by the transfer thread.
        self.peers: dict[str, Peer] = {}

    async def get(self, info: pb.WorkerInfo) -> Peer:
        """The peer of this incarnation, paired with now if need be.

        Raises:
            IncompatibleError: the two must not exchange pages; names both.
            WorkerLostError: it cannot be reached.
        """
        peer = self.peers.get(info.incarnation)
        if peer is not None:
            return peer
        if info.incarnation in self._ended:
            raise WorkerLostError(f"{info.worker_id} ({info.incarnation}) has ended")
        task = self._pairing.get(info.incarnation)
        if task is None:
            task = asyncio.create_task(self._pair(info))
            self._pairing[info.incarnation] = task
            task.add_done_callback(lambda _: self._pairing.pop(info.incarnation, None))
        return await asyncio.shield(task)

    async def _pair(self, info: pb.WorkerInfo) -> Peer:
        channel = make_channel(info.address)
        stub = decode_pb2_grpc.DecodeServiceStub(channel)
        try:
            reply = await stub.Pair(decode_pb.PairRequest(prefill=self._info), timeout=self._timeout_s)
            peer = await self._agree(info, reply, channel, stub)
        except BaseException as error:
            await channel.close(grace=None)
            if isinstance(error, grpc.RpcError):
                raise error_from_rpc(error, f"pairing with {info.worker_id}") from error
            raise
        if info.incarnation in self._ended:
            self._lost(peer)
            raise WorkerLostError(f"{info.worker_id} ({info.incarnation}) has ended while it was paired with")
        self.peers[info.incarnation] = peer
        self._paired(peer)
        if info.incarnation in self._ended:  # seen by whoever looks at its process from now on
            raise WorkerLostError(f"{info.worker_id} ({info.incarnation}) has ended since it answered")
        _log.info("paired with %s (%s) by protocol %d", info.worker_id, info.incarnation, peer.protocol)
        return peer

    async def _agree(
        self,
        wanted: pb.WorkerInfo,
        reply: decode_pb.PairReply,
        channel: aio.Channel,
        stub: decode_pb2_grpc.DecodeServiceAsyncStub,
    ) -> Peer:
        if reply.HasField("error"):
            raise error_from_proto(reply.error)
        info = reply.decode
        if info.incarnation != wanted.incarnation:
            raise WorkerLostError(f"{wanted.worker_id} is not {wanted.incarnation} any more, but {info.incarnation}")
        protocol = check_pair(self._info, info)
        layout = kv_format(info).layout
        shape = ArenaShape(layout.num_layers, info.num_pages, layout.extent_bytes)
        commits = CommitStream(
            stub,
            info.worker_id,
            self._info.incarnation,
            lambda answer: self._answered(info.incarnation, answer),
            lambda why: self._unreached(info.incarnation, why),
            self._timeout_s,
        )
        await commits.open()
        # Last, because the transport forgets only what has become a peer.
        name = await self._connect(info.transport_metadata)
        return Peer(info, name, layout, protocol, shape, channel, stub, commits)

    async def pair_again(self, peer: Peer, link: int) -> None:
        """Tell a peer that our end of the connection is closed, and that the one with this number comes next.

        Raises:
            WorkerLostError: it cannot be reached.
            TandemError: it refuses.
        """
        request = decode_pb.PairRequest(prefill=self._info, link=link)
        reply = await self._call(peer, "pairing", lambda: peer.stub.Pair(request, timeout=self._timeout_s))
        if reply.HasField("error"):
            raise error_from_proto(reply.error)
        if reply.decode.incarnation != peer.info.incarnation:
            raise WorkerLostError(f"{peer.info.worker_id} is not {peer.info.incarnation} any more")
        await self.reopen_commits(peer)

    async def await_greeting(self, peer: Peer, greeting: Greeting, timeout_s: float) -> bool:
        """Whether our greeting by this connection comes through in time. Raises as `attach`."""
        request = decode_pb.AwaitGreetingRequest(
            sender_incarnation=self._info.incarnation, link=greeting.link, trial=greeting.trial, timeout_s=timeout_s
        )
        limit_s = timeout_s + self._timeout_s
        reply = await self._call(peer, "greeting", lambda: peer.stub.AwaitGreeting(request, timeout=limit_s))
        return reply.has_come and reply.trial == greeting.trial

    async def reopen_commits(self, peer: Peer) -> None:
        """Have a stream for commits that this peer answers. While it is idle too, its end says that the peer cannot be
        reached. Raises as `attach`."""
        await peer.commits.open()

    def ended(self, incarnation: str) -> None:
        """The process of this incarnation has ended: drop all that was kept for it. Idempotent."""
        self._ended.add(incarnation)
        peer = self.peers.pop(incarnation, None)
        if peer is not None:
            self._lost(peer)

    # -- the calls of a handoff

    async def attach(self, peer: Peer, grant: Grant, *, renew: bool) -> decode_pb.AttachReply:
        """Raises `WorkerLostError` or `TransportError` when decode does not answer."""
        request = decode_pb.AttachRequest(
            request_id=grant.key.request_id,
            attempt=grant.key.attempt,
            grant_id=grant.grant_id,
            sender_incarnation=self._info.incarnation,
            renew=renew,
            capability=grant.capability,
        )
        return await self._call(peer, "attach", lambda: peer.stub.Attach(request, timeout=self._timeout_s))

    def is_here(self, receiver: str) -> bool:
        """Whether this decode worker is known to run on this host."""
        peer = self.peers.get(receiver)
        return peer is not None and peer.info.host_id == self._info.host_id

    async def _call(self, peer: Peer, what: str, call: Callable[[], Awaitable[_T]]) -> _T:
        """Call a peer. A channel that was closed, before or during the call, counts as a worker that is gone.

        Raises:
            WorkerLostError: it is gone, or did not answer in time.
            TransportError: the call failed in another way.
        """
        what = f"{what} to {peer.info.worker_id}"
        if self.peers.get(peer.info.incarnation) is not peer:
            raise WorkerLostError(f"{what}: {peer.info.incarnation} is gone")
        try:
            return await call()
        except grpc.RpcError as error:
            raise error_from_rpc(error, what) from error
        except aio.UsageError as error:  # the channel was closed before the call began
            raise WorkerLostError(f"{what}: {error}") from error
        except asyncio.CancelledError as error:
            # A channel that is closed cancels its calls; whoever cancels this task must be obeyed.
            task = asyncio.current_task()
            if task is None or task.cancelling() or self.peers.get(peer.info.incarnation) is peer:
                raise
            raise WorkerLostError(f"{what}: {peer.info.incarnation} has ended meanwhile") from error

    async def confirm_idle(self, idle: ConfirmIdle) -> None:
        """Tell decode that nothing of the grant is outstanding, until it has heard, is gone, or does not answer.

        Ends within `confirm_for_s` and the time of one call, so that it delays a drain for a bounded time only. After
        that decode's quarantine asks by itself, and the end of this process says the same.
        """
        request = decode_pb.ConfirmIdleRequest(
            request_id=idle.key.request_id,
            attempt=idle.key.attempt,
            grant_id=idle.grant_id,
            sender_incarnation=self._info.incarnation,
            capability=idle.capability,
        )
        give_up_s = time.monotonic() + self._confirm_for_s
        while time.monotonic() < give_up_s:
            peer = self.peers.get(idle.receiver)
            if peer is None:
                return
            stub = peer.stub
            try:
                await self._call(peer, "confirm", lambda s=stub: s.ConfirmIdle(request, timeout=self._timeout_s))  # type: ignore[misc]
                return
            except TandemError as error:
                _log.info("%s has not heard that %s is idle: %s", peer.info.worker_id, idle.grant_id, error)
            await asyncio.sleep(_CONFIRM_EVERY_S)

    async def close(self) -> None:
        peers = list(self.peers.values())
        self.peers.clear()
        for peer in peers:
            await peer.close()
