"""The prefill worker: wires role (runner), sender driver (transfer thread) and service (event loop) together."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from functools import partial
from typing import Any, ClassVar

from grpc import aio

from kvtransfer.extents import ArenaShape
from kvtransfer.protocol import sender_events as ev
from kvtransfer.protocol.attempts import SenderLimits
from kvtransfer.protocol.messages import AttemptKey, Commit, CommitPart, FailureReason, RefusalReason
from kvtransfer.transports.base import Transport
from kvtransfer.transports.events import LinkBroken, PeerId, ThreadEvent
from prefill_worker.attaching import Attaching
from prefill_worker.commits import Commits
from prefill_worker.connections import Connections
from prefill_worker.events import Event, HandoffStats, LinkChanged
from prefill_worker.links import LinkFigures, remembered
from prefill_worker.meetings import Meetings
from prefill_worker.peers import DecodePeers, Peer
from prefill_worker.prompt_vectors import PromptVectors
from prefill_worker.queued_driver import QueuedDriver
from prefill_worker.role import PrefillRole
from prefill_worker.sender_driver import SenderDriver
from prefill_worker.wire import make_events
from tandem.core import fault_points
from tandem.core.clock import MonotonicClock
from tandem.core.errors import HandoffError, TandemError
from tandem.core.identity import Role
from tandem.engine.pooler import mean_of, sum_rows
from tandem.engine.scorer import score_rows
from tandem.rpc.v1 import common_pb2 as pb
from tandem.rpc.v1 import decode_pb2 as decode_pb
from tandem.rpc.v1 import prefill_pb2 as prefill_pb
from tandem.rpc.v1 import prefill_pb2_grpc
from tandem.worker.limits import quarantine_cap_pages
from tandem.worker.parts import WorkerParts
from tandem.worker.sessions import SessionHub
from tandem.worker.step import StepHooks
from tandem.worker.ticker import Ticker
from tandem.worker.wire import join_events, refusal_from_proto, spec_from_proto

_log = logging.getLogger(__name__)

Hub = SessionHub[prefill_pb.PrefillCommand, Event | pb.WorkerInfo, prefill_pb.PrefillEvents]


class PrefillWorker:
    """Computes prompts and pushes their pages; made of the parts that a worker has."""

    role: ClassVar[Role] = Role.PREFILL

    def __init__(self, parts: WorkerParts) -> None:
        self.parts = parts
        transport = parts.config.transport
        self.hub: Hub = SessionHub(
            self,
            parts.loop,
            make_events,
            lambda: [parts.info, *parts.cache.everything()],
            parts.read_status,
            self.read_report,
            lambda: parts.load.newest,
            parts.cache.news,
            join=join_events,
            heartbeat_s=transport.lease_s / 4,
            interval_s=parts.config.metrics.worker_interval_s,
        )
        self.peers = DecodePeers(
            parts.info,
            self._connect,
            self._paired,
            self._peer_lost,
            self._answered,
            self._unreached,
            call_timeout_s=transport.lease_s,
            confirm_for_s=transport.lease_s + transport.grace_s,
        )
        self.connections = Connections(self.peers, self, transport.lease_s)
        self._meetings = Meetings(self.peers, self.connections, parts.life.spawn)
        self.commits = Commits(
            parts.worker_id, lambda receiver: self.peers.peers.get(receiver), parts.loop.call_soon_threadsafe
        )
        parts.ask_transfer(self.commits.bind)
        self._ticker = Ticker(parts.loop, lambda: parts.on_transfer(lambda _: self.driver.tick()))
        limits = SenderLimits(
            lease_margin_s=min(0.5, transport.lease_s / 10),
            write_timeout_s=transport.lease_s,
            resend_s=max(0.2, transport.lease_s / 5),
            answer_timeout_s=transport.lease_s,
            grace_s=transport.grace_s,
            quarantine_cap_pages=quarantine_cap_pages(transport, parts.pool.num_pages),
        )
        clock = MonotonicClock()
        self.driver = SenderDriver(
            incarnation=parts.incarnation,
            layout=parts.layout,
            shape=parts.arena_shape,
            take_digests=parts.take_digests,
            limits=limits,
            callbacks=self,
            write=parts.transfer.write,
            peer=self._transport_peer,
            clock=clock,
        )
        self._clock = clock
        # As last told by the driver. Replaced on the transfer thread, read in the event loop.
        self._links: tuple[LinkFigures, ...] = ()
        # Where each attempt's pages go. Written and read in the event loop.
        self._targets: dict[AttemptKey, pb.WorkerInfo] = {}
        # One for each time that decode is being told that nothing of a grant is outstanding; each for a bounded time,
        # see `DecodePeers.confirm_idle`. Added to by the transfer thread, taken from by the event loop.
        self._confirming: set[object] = set()
        self.core = PrefillRole(
            worker_id=parts.worker_id,
            scheduler=parts.scheduler,
            driver=QueuedDriver(self.driver, parts.on_transfer),
            emit=self.hub.emit,
            limits=parts.request_limits,
            num_layers=parts.layout.num_layers,
            extent_bytes=parts.layout.extent_bytes,
            sample=parts.engine.sampler(),
            guides=parts.guides,
            score=score_rows,
            counters=parts.counters,
            load=parts.load,
            clock=clock,
            is_draining=lambda: parts.life.draining,
            vectors=PromptVectors(sum_rows, mean_of) if parts.engine.pooling is not None else None,
        )

        self._attaching = Attaching(parts, self.peers, self.connections, self.driver, self.core)

    @property
    def hooks(self) -> StepHooks:
        return self.core

    @property
    def ahead(self) -> None:
        """A step may end prompts, whose places others take at once."""

    def add_services(self, server: aio.Server) -> None:
        prefill_pb2_grpc.add_PrefillServiceServicer_to_server(_PrefillService(self), server)

    def end_streams(self) -> None:
        """End what others keep open here, once what is queued has gone out; in the event loop."""
        self.hub.close()

    async def close(self) -> None:
        await self.peers.close()

    def on_transfer_event(self, event: ThreadEvent) -> None:
        if isinstance(event, LinkBroken):
            self.parts.loop.call_soon_threadsafe(self.connections.broke, event.peer, event.error)
        self.driver.on_transport(event)
        self.parts.counters.num_transfer_bytes = self.driver.num_bytes_written

    def read_report(self) -> pb.WorkerStatus:
        """The status, and what is known of the links to decode workers; in the event loop."""
        status = self.parts.read_report()
        status.links.SetInParent()  # also where there is none: those told of before are gone
        status.links.links.extend(self.connections.report(remembered(self._links, self._clock.now())))
        return status

    def num_held(self) -> int:
        """What a drain waits for: prompts that a router wants, and decode workers that are told of idle grants.

        It waits for no write of an attempt that has ended. Such a write may never end, but this process's end is a
        fence for it.
        """
        return self.core.num_wanted + len(self._confirming)

    # -- routers, in the event loop

    def command(self, session: int, command: prefill_pb.PrefillCommand) -> None:
        """One command of a router."""
        match command.WhichOneof("command"):
            case "start":
                self._take_in(session, command.start)
            case "attach":
                attach = command.attach
                target = self._targets.get(AttemptKey(attach.request_id, attach.attempt))
                if target is not None:  # else it was cancelled meanwhile
                    self.parts.life.spawn(self._attaching.attach(attach, target))
            case "cancel":
                key = AttemptKey(command.cancel.request_id, command.cancel.attempt)
                self.parts.runner.submit(lambda: self.core.cancel(key))
            case "release":
                request_id = command.release.request_id
                self.parts.runner.submit(lambda: self.core.release_request(request_id))
            case "meet":
                self._meetings.meet(command.meet.decode)
            case other:
                _log.warning("a router sent a command that this version does not know: %s", other)

    def _take_in(self, session: int, start: prefill_pb.StartPrefill) -> None:
        key, receiver = AttemptKey(start.request_id, start.attempt), start.decode.incarnation
        try:
            spec = spec_from_proto(start)
        except TandemError as error:
            self.parts.runner.submit(partial(self.core.refuse, session, key, error))
            return
        self._targets[key] = start.decode
        # Opened from here, so that no grant can be attached before, however long the runner's step takes.
        num_pages = self.parts.scheduler.groups.num_handed_off(len(spec.prompt_ids))
        self.parts.on_transfer(lambda _: self.driver.open(key, num_pages, receiver))
        number = self.parts.load.arriving(len(spec.prompt_ids))

        def begin() -> None:
            self.parts.load.taken_in(number)
            self.core.start(session, spec)

        self.parts.runner.submit(begin)

    def session_ended(self, session: int) -> None:
        """A router is gone."""
        self.parts.runner.submit(lambda: self.core.session_ended(session))

    # -- decode workers, in the event loop

    async def _connect(self, metadata: bytes) -> PeerId:
        return await asyncio.wrap_future(self.parts.transfer.submit(lambda transport: transport.connect(metadata)))

    # -- what connections need of the worker (`prefill_worker.connections.Calls`)

    def ask_transport(self, command: Callable[[Transport], Any]) -> Awaitable[Any]:
        return asyncio.wrap_future(self.parts.transfer.submit(command))

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        self.parts.life.spawn(work)

    def link_changed(self, peer: Peer, *, is_broken: bool) -> None:
        here, there = self.parts.info, peer.info
        changed = LinkChanged(here.worker_id, here.incarnation, there.worker_id, there.incarnation, is_broken)
        self.hub.broadcast([changed])

    def link_closed(self, receiver: str) -> None:
        self.parts.on_transfer(lambda _: self.driver.link_closed(receiver))

    async def drained(self, receiver: str) -> None:
        are_drained = asyncio.Event()

        def tell() -> None:
            self.parts.loop.call_soon_threadsafe(are_drained.set)

        self.parts.on_transfer(lambda _: self.driver.when_drained(receiver, tell))
        await are_drained.wait()

    def _paired(self, peer: Peer) -> None:
        """Have the connection made, and watch the process.

        Its exit, seen on this host, ends all that was sent to it; from other hosts the supervisor tells.
        """
        self.connections.begin(peer)
        if peer.info.host_id == self.parts.info.host_id:
            incarnation = peer.info.incarnation
            self.parts.exits.watch(incarnation, peer.info.pid, lambda: self.process_ended(incarnation))

    def process_ended(self, incarnation: str) -> None:
        """A process has ended, on whatever host: if it was a decode worker, nothing can be sent to it any more."""
        self.peers.ended(incarnation)
        self.connections.forget(incarnation)
        keys = [key for key, target in self._targets.items() if target.incarnation == incarnation]
        if keys:
            self.parts.runner.submit(lambda: self.core.receiver_ended(keys, incarnation))

    def _unreached(self, receiver: str, why: str) -> None:
        """Nothing tells whether an idle connection for pages can still be used. Within a host nothing lies between."""
        if not self.peers.is_here(receiver):
            self.connections.suspect(receiver, why)

    def _peer_lost(self, peer: Peer) -> None:
        def forget(transport: Transport) -> None:
            self.driver.receiver_lost(peer.info.incarnation)
            transport.disconnect(peer.name)

        self.parts.on_transfer(forget)
        self.parts.life.spawn(peer.close())

    def _transport_peer(self, receiver: str) -> tuple[PeerId, ArenaShape] | None:
        peer = self.peers.peers.get(receiver)
        return (peer.name, peer.shape) if peer is not None else None

    # -- what the driver says; on the transfer thread

    def commit_part(self, part: CommitPart) -> None:
        self.commits.send(part)

    def commit(self, commit: Commit, *, again: bool) -> None:
        self.commits.send(commit, again=again)

    def _answered(self, receiver: str, answer: decode_pb.CommitAnswer) -> None:
        """What decode says of a commit, or against a part; in the event loop."""
        key = AttemptKey(answer.request_id, answer.attempt)
        event: ev.SenderEvent = (
            ev.AckReceived(answer.grant_id) if answer.ok else ev.RefusalReceived(*refusal_from_proto(answer.error))
        )
        # Hosts do not agree in their monotonic clocks; processes of one host do.
        verified_at_s = answer.verified_at_s if self.peers.is_here(receiver) else 0.0
        self.parts.on_transfer(lambda _: self._take_answer(key, receiver, answer.grant_id, event, verified_at_s))

    def _take_answer(
        self, key: AttemptKey, receiver: str, grant_id: str, event: ev.SenderEvent, verified_at_s: float
    ) -> None:
        if not self.driver.has_asked(key, receiver, grant_id):
            _log.info("an answer of %s is ignored: %.100r of %s is over, or nobody asked", receiver, grant_id, key)
            return
        fault_points.reach("prefill.committed")
        if verified_at_s:
            self.driver.verified(key, verified_at_s)
        self.driver.happened(key, event)

    def stop_asked(self, key: AttemptKey, asked: ev.StopAsked) -> int:
        """Somebody, perhaps decode, wants the writes of a grant to end; on the transfer thread. Returns how many bytes
        of it are still under way."""
        num_bytes = self.driver.stop_asked(key, asked)
        if self.driver.num_stops_ignored:
            self.parts.counters.num_refused = {RefusalReason.BAD_CAPABILITY.value: self.driver.num_stops_ignored}
        return num_bytes

    def confirm_idle(self, idle: ev.ConfirmIdle) -> None:
        this = object()  # decode may ask for the same grant several times at once
        self._confirming.add(this)
        self.parts.loop.call_soon_threadsafe(lambda: self.parts.life.spawn(self._confirm_idle(idle, this)))

    async def _confirm_idle(self, idle: ev.ConfirmIdle, this: object) -> None:
        try:
            await self.peers.confirm_idle(idle)
        finally:
            self._confirming.discard(this)
            self.parts.runner.submit(self.parts.life.check_drained)

    def succeeded(self, key: AttemptKey, stats: HandoffStats) -> None:
        self.parts.runner.submit(lambda: self.core.handed_off(key, stats))

    def failed(self, failure: ev.Fail) -> None:
        reason = failure.refusal.value if failure.refusal else failure.reason.value
        error = HandoffError(f"the handoff failed: {reason} ({failure.detail})", reason=reason)
        error.request_id = failure.key.request_id
        error.retryable = failure.retryable
        if failure.reason is FailureReason.CANCELLED:
            return  # the caller that cancelled it knows
        self.parts.runner.submit(lambda: self.core.handoff_failed(failure.key, error))

    def quarantine(self, pages: tuple[int, ...]) -> None:
        self.parts.runner.submit(lambda: self.core.quarantine(pages))

    def release(self, pages: tuple[int, ...]) -> None:
        if pages:
            self.parts.runner.submit(lambda: self.core.release(pages))

    def closed(self, key: AttemptKey) -> None:
        self.commits.closed(key)
        self.parts.loop.call_soon_threadsafe(self._targets.pop, key, None)
        self.parts.runner.submit(lambda: self.core.closed(key))

    def replace_self(self, num_quarantined: int) -> None:
        self.parts.life.replace_self(num_quarantined)

    def links_changed(self, links: tuple[LinkFigures, ...]) -> None:
        self._links = links
        self.hub.status_changed()

    def link_hangs(self, receiver: str, why: str) -> None:
        """Unless it is found to carry, what hangs is settled by closing the connection."""
        self.parts.loop.call_soon_threadsafe(self.connections.suspect, receiver, why)

    def deadline(self, deadline_s: float | None) -> None:
        self._ticker.set(deadline_s)


class _PrefillService(prefill_pb2_grpc.PrefillServiceServicer):
    def __init__(self, worker: PrefillWorker) -> None:
        self._worker = worker

    async def Session(
        self, request_iterator: AsyncIterator[prefill_pb.PrefillCommand], _: Any
    ) -> AsyncIterator[prefill_pb.PrefillEvents]:
        async for events in self._worker.hub.run(request_iterator):
            yield events

    async def StopWrites(self, request: prefill_pb.StopWritesRequest, _: Any) -> prefill_pb.StopWritesReply:
        worker = self._worker
        key = AttemptKey(request.request_id, request.attempt)
        receiver = request.grant_id.rpartition("/")[0]
        asked = ev.StopAsked(request.grant_id, receiver, request.capability)
        if worker.parts.life.stopping:  # its end says more than an answer would
            return prefill_pb.StopWritesReply()
        num_bytes = await asyncio.wrap_future(worker.parts.ask_transfer(lambda _: worker.stop_asked(key, asked)))
        return prefill_pb.StopWritesReply(sender_incarnation=worker.parts.incarnation, num_bytes_left=num_bytes)
