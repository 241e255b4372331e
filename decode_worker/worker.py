"""The decode worker: wires its core, the driver of its handoffs and its service together, each to its threads."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from typing import Any, ClassVar, TypeVar

import grpc
from grpc import aio

from decode_worker.commits import CommitStreams, error_of
from decode_worker.events import Event, WriterSuspected
from decode_worker.links import WriterLinks
from decode_worker.receiver_driver import Answer, ReceiverDriver
from decode_worker.role import DecodeRole
from decode_worker.wire import make_events
from kvtransfer.protocol.grants import ReceiverLimits
from kvtransfer.protocol.messages import AttemptKey, Grant, RefusalReason
from kvtransfer.transports.base import Transport
from kvtransfer.transports.envelope import unpack
from kvtransfer.transports.events import Greeting, GreetingArrived, MessageArrived, ThreadEvent
from kvtransfer.wire import check_pair
from tandem.core import fault_points
from tandem.core.clock import Clock, MonotonicClock
from tandem.core.errors import InvalidRequestError, TandemError, TransportError, WorkerLostError
from tandem.core.identity import Role
from tandem.core.pages import PagePool
from tandem.core.remembered import Remembered
from tandem.engine.engine import Engine
from tandem.engine.scorer import score_rows
from tandem.rpc.channel import make_channel
from tandem.rpc.convert import error_to_proto
from tandem.rpc.v1 import common_pb2 as pb
from tandem.rpc.v1 import decode_pb2 as decode_pb
from tandem.rpc.v1 import decode_pb2_grpc, prefill_pb2_grpc
from tandem.rpc.v1 import prefill_pb2 as prefill_pb
from tandem.worker.draft_model import DraftModel
from tandem.worker.drafts import Drafts
from tandem.worker.guesses import Guesses
from tandem.worker.limits import guess_rows, quarantine_cap_pages
from tandem.worker.parts import WorkerParts
from tandem.worker.request import AttemptFailed
from tandem.worker.sessions import SessionHub
from tandem.worker.step import AheadHooks, StepHooks
from tandem.worker.step_engine import StepEngine
from tandem.worker.ticker import Ticker
from tandem.worker.wire import join_events, spec_from_proto

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

# Ended incarnations that are remembered.
_NUM_REMEMBERED = 1024

Hub = SessionHub[decode_pb.DecodeCommand, Event | pb.WorkerInfo, decode_pb.DecodeEvents]


class DecodeWorker:
    """Takes handoffs and generates tokens; made of the parts that a worker has."""

    role: ClassVar[Role] = Role.DECODE

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
        self.commits = CommitStreams(self, parts.loop)
        self.links = WriterLinks(parts.transfer.submit)
        # By incarnation: prefill workers that have paired and are not known to have exited. In the event loop.
        self._writers: dict[str, pb.WorkerInfo] = {}
        self._channels: dict[str, aio.Channel] = {}
        # Incarnations that have provably ended, newest last: a pairing of theirs may still be on its way.
        self._ended = Remembered[str](_NUM_REMEMBERED)
        self._ticker = Ticker(parts.loop, lambda: parts.on_transfer(lambda _: self.driver.tick()))
        limits = ReceiverLimits(
            lease_s=transport.lease_s,
            grace_s=transport.grace_s,
            ask_again_s=max(0.2, transport.lease_s / 10),
            longest_drain_s=6 * transport.lease_s,
            quarantine_cap_pages=quarantine_cap_pages(transport, parts.pool.num_pages),
        )
        clock = MonotonicClock()
        self.driver = ReceiverDriver(
            parts.incarnation,
            parts.layout,
            parts.arena_shape,
            parts.take_digests,
            limits,
            self,
            secrets.token_bytes(32),
            clock,
        )
        self.core = DecodeRole(
            worker_id=parts.worker_id,
            scheduler=parts.scheduler,
            driver=self.driver,
            emit=self.hub.emit,
            limits=parts.request_limits,
            queue_bound=parts.config.scheduling.worker_queue_bound,
            sample=parts.engine.sampler(),
            guides=parts.guides,
            score=score_rows,
            counters=parts.counters,
            load=parts.load,
            clock=clock,
            is_draining=lambda: parts.life.draining,
            guesses=_guesses(parts, clock),
            to_runner=lambda call: parts.runner.submit(call),
            to_driver=self._to_driver,
        )
        parts.ask_transfer(lambda transport: self.driver.bind(transport, self.core, self.on_transfer_event))

    @property
    def hooks(self) -> StepHooks:
        return self.core

    @property
    def ahead(self) -> AheadHooks:
        return self.core

    def _to_driver(self, call: Callable[[], None]) -> None:
        self.parts.on_transfer(lambda _: call())

    def add_services(self, server: aio.Server) -> None:
        decode_pb2_grpc.add_DecodeServiceServicer_to_server(_DecodeService(self), server)

    def end_streams(self) -> None:
        self.hub.close()
        self.commits.close()

    async def close(self) -> None:
        for channel in self._channels.values():
            await channel.close(grace=None)

    def on_transfer_event(self, event: ThreadEvent) -> None:
        """A decode worker posts nothing: it hears of writes that have arrived, and of what comes behind them."""
        match event:
            case MessageArrived():
                self.commits.heard(self.driver, event)
                self._note_refusals()
            case GreetingArrived():
                self.parts.loop.call_soon_threadsafe(self.links.greeted, event.peer, event.greeting)
            case _:
                self.driver.on_transport(event)

    def read_report(self) -> pb.WorkerStatus:
        """The status, with what heartbeats alone have."""
        return self.parts.read_report()

    def num_held(self) -> int:
        with self.parts.scheduler.lock:  # who is being taken in is held, or hears of the drain
            return len(self.core.ledger.attempts)

    # -- routers, in the event loop

    def command(self, session: int, command: decode_pb.DecodeCommand) -> None:
        """One command of a router."""
        match command.WhichOneof("command"):
            case "reserve":
                self._reserve(session, command.reserve)
            case "cancel":
                key = AttemptKey(command.cancel.request_id, command.cancel.attempt)
                discards = command.cancel.discards
                self._to_driver(lambda: self.core.cancel(key, discards=discards))
            case "end_choice":
                end = command.end_choice
                self._to_driver(lambda: self.core.end_choice(AttemptKey(end.request_id, end.attempt), end.choice))
            case other:
                _log.warning("a router sent a command that this version does not know: %s", other)

    def _reserve(self, session: int, reserve: decode_pb.Reserve) -> None:
        try:
            spec = spec_from_proto(reserve)
        except InvalidRequestError as error:
            self.hub.emit({session: [AttemptFailed(AttemptKey(reserve.request_id, reserve.attempt), error)]})
            return
        num_tokens = len(spec.prompt_ids) if reserve.max_local_tokens else 0
        number = self.parts.load.arriving(num_tokens)

        def take_in() -> None:
            self.parts.load.taken_in(number)
            self.core.reserve(session, spec, reserve.max_local_tokens, unpaced=reserve.unpaced)
            if self.parts.load.is_behind:  # refused, or nothing new
                self.core.snapshot()

        self._to_driver(take_in)

    def session_ended(self, session: int) -> None:
        """A router is gone."""
        self._to_driver(lambda: self.core.session_ended(session))

    # -- prefill workers, in the event loop

    async def pair(self, prefill: pb.WorkerInfo, link: int) -> None:
        """Agree with a prefill worker, or refuse it.

        Args:
            link: the number of the connection by which it is about to write. If it had one with a lower number, both
                live, that one broke, and the prefill worker has closed its end.

        Raises:
            IncompatibleError: naming both sides and what differs.
            TransportError: its metadata cannot be used.
            WorkerLostError: its process has ended.
        """
        protocol = check_pair(prefill, self.parts.info)
        incarnation, metadata = prefill.incarnation, prefill.transport_metadata
        described = unpack(metadata, prefill.transport)[0].agent_name
        if described != incarnation:  # or its end would be taken for that of whoever the description is of
            raise TransportError(f"{prefill.worker_id} ({incarnation}) gives the description of {described} as its own")
        self._check_alive(prefill)
        is_here = prefill.host_id == self.parts.info.host_id
        peer = await self.links.connect(
            incarnation, link, metadata, lambda: self.driver.link_closed(incarnation, is_here=is_here)
        )
        try:
            self._check_alive(prefill)
        except WorkerLostError:
            self.parts.on_transfer(lambda transport: transport.disconnect(peer))
            raise
        # A new incarnation under an old worker id proves nothing about the old one: it may write to this day.
        self._writers[incarnation] = prefill
        _log.info("paired with %s (%s) by protocol %d", prefill.worker_id, incarnation, protocol)
        if is_here:
            self.parts.exits.watch(incarnation, prefill.pid, lambda: self.process_ended(incarnation))

    async def await_greeting(self, request: decode_pb.AwaitGreetingRequest) -> bool:
        """Whether a greeting comes on this connection, in the time that the prefill worker gives it."""
        writer = request.sender_incarnation
        if not self.has_paired(writer):
            return False
        timeout_s = min(request.timeout_s, self.parts.config.transport.lease_s)
        greeting = Greeting(request.link, request.trial)
        try:
            return await self.links.await_greeting(writer, greeting, timeout_s)
        except TransportError as stops:
            _log.info("%s is not waited for: %s", writer, stops)
            return False

    def _check_alive(self, prefill: pb.WorkerInfo) -> None:
        if prefill.incarnation in self._ended:
            raise WorkerLostError(f"{prefill.worker_id} ({prefill.incarnation}) has ended")

    def process_ended(self, incarnation: str) -> None:
        """Seen on this host, or proved by the supervisor: a fence for all that the process might have written."""
        if incarnation in self._ended:
            return
        self._ended.add(incarnation)
        self.parts.exits.forget(incarnation)
        self.links.forget(incarnation)
        writer = self._writers.pop(incarnation, None)
        if writer is None:
            return
        _log.info("prefill worker %s has exited", incarnation)
        channel = self._channels.pop(incarnation, None)
        if channel is not None:
            self.parts.life.spawn(channel.close(grace=None))
        is_here = writer.host_id == self.parts.info.host_id
        self.parts.on_transfer(lambda _: self.driver.writer_exited(incarnation, is_here=is_here))

    def has_paired(self, incarnation: str) -> bool:
        """Whether this writer is known and not seen to exit: its exit would be heard of after whatever it asks."""
        return incarnation in self._writers

    async def _ask_to_stop(self, sender: str, request: prefill_pb.StopWritesRequest) -> None:
        writer = self._writers.get(sender)
        if writer is None:
            return
        try:
            if sender not in self._channels:
                self._channels[sender] = make_channel(writer.address)
            stub = prefill_pb2_grpc.PrefillServiceStub(self._channels[sender])
            reply = await stub.StopWrites(request, timeout=self.parts.config.transport.lease_s)
        except (grpc.RpcError, TandemError) as error:
            # Asked again by the protocol's clock, and killed when it stays silent.
            _log.warning("%s did not hear that %s has ended: %s", writer.worker_id, request.grant_id, error)
            return
        num_bytes = reply.num_bytes_left
        if num_bytes and reply.sender_incarnation == sender:  # else another process answers at that address
            grant_id = request.grant_id
            self.parts.on_transfer(lambda _: self.driver.writer_draining(grant_id, sender, num_bytes))

    # -- what the driver says; on the transfer thread

    def ask_to_stop(self, sender: str, grant: Grant, reason: RefusalReason) -> None:
        request = prefill_pb.StopWritesRequest(
            request_id=grant.key.request_id,
            attempt=grant.key.attempt,
            grant_id=grant.grant_id,
            reason=reason.value,
            capability=grant.capability,
        )
        self.parts.loop.call_soon_threadsafe(lambda: self.parts.life.spawn(self._ask_to_stop(sender, request)))

    def kill_writer(self, sender: str) -> None:
        _log.error("writer %s is silent beyond lease and grace: it must be killed", sender)
        writer = self._writers.get(sender)
        worker_id = writer.worker_id if writer is not None else ""
        # To every router: the request itself, and with it the session that had it, may be long gone.
        self.hub.broadcast([WriterSuspected(worker_id, sender)])

    def replace_self(self, num_quarantined: int) -> None:
        self.parts.life.replace_self(num_quarantined)

    def deadline(self, deadline_s: float | None) -> None:
        self._ticker.set(deadline_s)

    # -- calls that wait for the transfer thread

    def ask_driver(self, question: Callable[[ReceiverDriver], _T]) -> Future[_T]:
        """Ask the driver; `question` runs on the transfer thread.

        No peer can make it raise: what it raises is a defect, and the worker's end.

        Raises:
            TransportError: the worker is stopping.
        """

        def ask(_: Transport) -> _T:
            answer = question(self.driver)
            self._note_refusals()
            return answer

        return self.parts.ask_transfer(ask)

    def _note_refusals(self) -> None:
        if self.driver.num_refused > sum(self.parts.counters.num_refused.values()):
            self.parts.counters.num_refused = {reason.value: number for reason, number in self.driver.refusals.items()}
            self.hub.status_changed()


def _guesses(parts: WorkerParts, clock: Clock) -> Guesses | None:
    most, draft, limits = parts.config.speculation.lookup_tokens, parts.draft, parts.request_limits
    if not most and draft is None:
        return None
    num_rows, page_size = _num_rows(parts.engine), parts.scheduler.pool.page_size
    if not num_rows:  # guessing nothing would still keep steps from being planned ahead
        _log.warning("speculation.lookup_tokens has no effect here: guesses are for decode workers on CPUs")
        return None
    drafts = _drafts(parts, draft, clock) if draft is not None else None
    return Guesses(most, num_rows, page_size, limits.max_context, limits.eos, drafts)


def _drafts(parts: WorkerParts, draft: Engine, clock: Clock) -> Drafts:
    engine = parts.engine
    return Drafts(
        DraftModel(draft, engine.vocab_size, engine.sampler()),
        PagePool(draft.num_pages, draft.layout.page_size),
        most=parts.config.speculation.draft_tokens,
        num_rows=_num_rows(draft),
        max_context=draft.max_context,
        vocab_size=draft.vocab_size,
        ends=parts.request_limits.eos,
        clock=clock,
    )


def _num_rows(engine: StepEngine) -> int:
    return guess_rows(on_cpu=engine.on_cpu, widens=engine.types.widens, in_tiles=engine.types.in_tiles)


class _DecodeService(decode_pb2_grpc.DecodeServiceServicer):
    def __init__(self, worker: DecodeWorker) -> None:
        self._worker = worker

    async def Session(
        self, request_iterator: AsyncIterator[decode_pb.DecodeCommand], _: Any
    ) -> AsyncIterator[decode_pb.DecodeEvents]:
        async for events in self._worker.hub.run(request_iterator):
            yield events

    async def Pair(self, request: decode_pb.PairRequest, _: Any) -> decode_pb.PairReply:
        try:
            await self._worker.pair(request.prefill, request.link)
        except TandemError as error:
            return decode_pb.PairReply(decode=self._worker.parts.info, error=error_to_proto(error))
        return decode_pb.PairReply(decode=self._worker.parts.info)

    async def AwaitGreeting(
        self, request: decode_pb.AwaitGreetingRequest, _: Any
    ) -> decode_pb.AwaitGreetingReply:
        has_come = await self._worker.await_greeting(request)
        return decode_pb.AwaitGreetingReply(has_come=has_come, trial=request.trial)

    async def Attach(self, request: decode_pb.AttachRequest, _: Any) -> decode_pb.AttachReply:
        if not self._worker.has_paired(request.sender_incarnation):
            answer = Answer(RefusalReason.WRITER_EXITED, f"{request.sender_incarnation} is not paired with")
        else:
            answer = await asyncio.wrap_future(self._worker.ask_driver(lambda driver: _attach(driver, request)))
        lease_s = self._worker.parts.config.transport.lease_s
        error = error_of(answer, request.request_id)
        return decode_pb.AttachReply(ok=answer.refusal is None, error=error, lease_s=lease_s)

    async def Commits(
        self, request_iterator: AsyncIterator[decode_pb.CommitCall], _: Any
    ) -> AsyncIterator[decode_pb.CommitAnswer]:
        async for answer in self._worker.commits.run(request_iterator):
            yield answer

    async def ConfirmIdle(self, request: decode_pb.ConfirmIdleRequest, _: Any) -> decode_pb.ConfirmIdleReply:
        asked = self._worker.ask_driver(
            lambda driver: driver.confirm_idle(request.grant_id, request.sender_incarnation, request.capability)
        )
        await asyncio.wrap_future(asked)
        return decode_pb.ConfirmIdleReply()


def _attach(driver: ReceiverDriver, request: decode_pb.AttachRequest) -> Answer:
    answer = driver.attach(request.grant_id, request.sender_incarnation, request.capability, renew=request.renew)
    if answer.refusal is None and not request.renew:
        fault_points.reach("decode.attached")
    return answer
