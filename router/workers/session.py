"""The router's stream to one incarnation of a worker: commands out, events in, and whether the worker lives.

    connecting ──hello──> open ──stream broken or silent──> lost ──back-off──> connecting
    any ──retired and idle, or closed──> closed

A worker cancels all that a broken stream had started, so each request that it held is told at once. The session
reconnects as long as the membership lists this incarnation.
"""

from __future__ import annotations

import asyncio
import logging
from enum import Enum
from typing import Any, Protocol

import grpc

from kvtransfer.wire import kv_format, protocols_of
from router.policy.known_load import KnownLoad, Report
from router.policy.worker_load import WorkerLoad
from router.request.events import DecodeLeaves, Event, WorkerLost, WorkerSilent
from router.request.mailbox import Mailbox
from router.workers import wire
from router.workers.watchdog import Watchdog
from tandem.core.errors import TandemError, WorkerLostError
from tandem.core.identity import Role, WorkerKey
from tandem.core.protocols import Protocols, agree
from tandem.rpc.channel import make_channel
from tandem.rpc.convert import ROLE_FROM_PROTO, prompt_steps_from_proto
from tandem.rpc.duplex import writing
from tandem.rpc.v1.common_pb2 import CachedPages, Cancel, Token, WorkerInfo, WorkerStatus
from tandem.rpc.v1.control_pb2 import Member
from tandem.rpc.v1.decode_pb2 import DecodeCommand
from tandem.rpc.v1.decode_pb2_grpc import DecodeServiceStub
from tandem.rpc.v1.prefill_pb2 import PrefillCommand
from tandem.rpc.v1.prefill_pb2_grpc import PrefillServiceStub

_log = logging.getLogger(__name__)

_FIRST_BACKOFF_S = 0.05
_MAX_BACKOFF_S = 2.0


class SessionState(Enum):
    CONNECTING = "connecting"
    OPEN = "open"
    LOST = "lost"
    CLOSED = "closed"


class SessionObserver(Protocol):
    """Hears what does not concern a single request."""

    def session_changed(self, session: WorkerSession) -> None: ...

    def readiness_changed(self, session: WorkerSession) -> None:
        """It takes requests or does not any more, while its state stays."""

    def worker_died(self, session: WorkerSession) -> None:
        """It was lost without a plan; called once for each incarnation."""

    def status_reported(self, session: WorkerSession, status: WorkerStatus) -> None: ...

    def load_changed(self, session: WorkerSession) -> None:
        """What the worker holds for us has changed, and with it `load`."""

    def pages_cached(self, session: WorkerSession, news: CachedPages) -> None:
        """The worker's prefix cache has entered pages, or given some up."""

    def event_seen(self, message: Any) -> None:
        """A message of the worker, other than its hello and its tokens."""


class WorkerSession:
    """The stream to one incarnation. All methods run on the router's loop."""

    def __init__(self, member: Member, *, lease_s: float, observer: SessionObserver) -> None:
        self.member = member
        self.key = WorkerKey(member.worker_id, member.incarnation)
        self.role = ROLE_FROM_PROTO[member.role]
        self.state = SessionState.CONNECTING
        self.info = WorkerInfo()  # empty until the first hello
        self.status = WorkerStatus()
        self.kv_format = kv_format(WorkerInfo())  # set with `info`
        self._lease_s = lease_s
        self._observer = observer
        # Invariant: all and only requests with an attempt under way at this worker.
        self._held: dict[str, Mailbox[Event]] = {}
        self._known = KnownLoad()  # of these requests, and by the worker's own word
        self._num_sent = 0  # commands on this stream
        self._commands: asyncio.Queue[Any] = asyncio.Queue()
        self._is_retired = False
        self._has_died = False
        self._is_overdue = False
        self.why_unreached = ""  # as it was last logged, since the stream was last open
        self._task: asyncio.Task[None] | None = None

    # -- for the registry

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name=f"session {self.key}")

    def update(self, member: Member) -> None:
        """The membership says something new about the same incarnation."""
        was_leaving, self.member = self.is_leaving, member
        self._tell_leaving(was_leaving)

    def retire(self) -> None:
        """The membership no longer lists it: close once nothing is held, and never reconnect."""
        self._is_retired = True
        if not self._held or self.state is not SessionState.OPEN:
            self.close("the worker left the cluster")

    def declare_dead(self, why: str) -> None:
        """The supervisor says that this life has ended: close, and count the death unless it was noticed before."""
        if self.state is SessionState.OPEN:
            self._note_death()
        self.close(why)

    def close(self, why: str) -> None:
        """End the stream now; what is held is lost."""
        if self.state is SessionState.CLOSED:
            return
        self._set_state(SessionState.CLOSED)
        self._tell_lost(WorkerLostError(f"worker {self.key}: {why}"))
        if self._task is not None:
            self._task.cancel()

    async def wait_closed(self) -> None:
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)

    @property
    def is_prefill(self) -> bool:
        return self.role is Role.PREFILL

    @property
    def takes_requests(self) -> bool:
        """Whether new requests may go there."""
        ready = self.member.state == "ready" and not self.status.draining
        return ready and not self._is_retired and self.is_heard

    @property
    def is_heard(self) -> bool:
        """Whether it is connected, and tells its status in time."""
        return self.state is SessionState.OPEN and not self._is_overdue

    @property
    def is_leaving(self) -> bool:
        """Whether it drains, by its own word or the supervisor's; its end is no death then."""
        return self.status.draining or self.member.state == "draining"

    @property
    def shown_state(self) -> str:
        """`starting`, `ready`, `silent`, `draining` or `failed`, for people and tools."""
        if self.state in (SessionState.LOST, SessionState.CLOSED) or self.member.state == "failed":
            return "failed"
        if self.state is SessionState.CONNECTING:
            return "failed" if self.info.worker_id else "starting"
        if self.status.draining or self._is_retired:
            return "draining"
        if self._is_overdue:
            return "silent"
        return self.member.state

    @property
    def num_sequences(self) -> int:
        """Of this router's requests that it has."""
        return self._known.num_sequences

    def load(self) -> WorkerLoad:
        """This worker in a placement snapshot."""
        info, page_size = self.info, max(1, self.info.layout.page_size)
        return self._known.load(self.key, self.kv_format, page_size, info.max_num_seqs)

    # -- for requests

    def hold(
        self,
        request_id: str,
        mailbox: Mailbox[Event],
        num_prompt_tokens: int,
        *,
        computes: bool,
        num_sequences: int = 1,
    ) -> None:
        """From now on events of `request_id` go to `mailbox`, and the loss of this worker too.

        The next command is the one that starts it.

        Args:
            computes: the prompt is to be computed there.
            num_sequences: that it will be there.
        """
        layout = self.kv_format.layout  # before its hello a worker has pages of no size
        num_pages = layout.num_sent_pages(num_prompt_tokens) if layout.page_size and not self.is_prefill else 0
        self._held[request_id] = mailbox
        self._known.hold(
            request_id,
            self._num_sent + 1,
            num_prompt_tokens,
            num_pages,
            computes=computes,
            num_sequences=num_sequences,
        )
        self._observer.load_changed(self)

    def note_taken_up(self, request_id: str, *, steps: bool) -> None:
        """The worker computes the prompt, has pages for it, or generates: its own figures show so from now on.

        Args:
            steps: the request takes part in the worker's steps.
        """
        if self._known.note_taken_up(request_id, steps=steps):
            self._observer.load_changed(self)

    def let_go(self, request_id: str) -> None:
        """The attempt is over here."""
        if self._held.pop(request_id, None) is not None:
            self._known.let_go(request_id)
            self._observer.load_changed(self)
        if self._is_retired and not self._held:
            self.close("the worker left the cluster")

    def send(self, command: PrefillCommand | DecodeCommand) -> None:
        """Queue a command. It is lost with the stream, as is all that it would have changed."""
        if self.state is SessionState.OPEN:
            self._commands.put_nowait(command)
            self._num_sent += 1

    def cancel(self, request_id: str, attempt: int, reason: str, *, discards: bool = False) -> None:
        """Tell the worker to drop an attempt and free all it holds; `discards`: what was computed for it may be wrong,
        and nothing of it is to stay in a cache."""
        message = Cancel(request_id=request_id, attempt=attempt, reason=reason, discards=discards)
        self.send(PrefillCommand(cancel=message) if self.is_prefill else DecodeCommand(cancel=message))

    # -- the stream

    async def _run(self) -> None:
        backoff_s = _FIRST_BACKOFF_S
        while not self._is_closed():
            try:
                await self._one_stream()
                error: TandemError = WorkerLostError(f"worker {self.key} ended its stream")
            except grpc.aio.AioRpcError as rpc_error:
                error = WorkerLostError(
                    f"the connection to worker {self.key} broke: {rpc_error.code().name} {rpc_error.details()}"
                )
            except TandemError as tandem_error:
                # Without its frames and those of its cause: they hold the call, and gRPC keeps a connection open as
                # long as a call lives.
                error = tandem_error.with_traceback(None)
                error.__context__ = None
            except Exception as unforeseen:  # noqa: BLE001 - logged; a message that we cannot read ends the stream
                _log.exception("unforeseen error in the stream of worker %s", self.key)
                error = WorkerLostError(f"the stream of worker {self.key} failed: {unforeseen}")
            if self._is_closed():
                return
            was_open = self.state is SessionState.OPEN
            if was_open:
                backoff_s = _FIRST_BACKOFF_S
                _log.warning("worker %s lost with %d requests that it held: %s", self.key, len(self._held), error)
                self._note_death()
                self._set_state(SessionState.LOST)
            elif error.message != self.why_unreached:
                self.why_unreached = error.message
                _log.warning("worker %s not reached, trying again: %s", self.key, error.message)
            self._tell_lost(error)
            if self._is_retired:
                self.close("the worker left the cluster")
                return
            await asyncio.sleep(backoff_s)
            backoff_s = min(backoff_s * 2, _MAX_BACKOFF_S)
            self._set_state(SessionState.CONNECTING)

    async def _one_stream(self) -> None:
        """One connection, from its opening to its end. Raises `WorkerLostError` or gRPC's error."""
        self._commands, self._num_sent = asyncio.Queue(), 0
        self._is_overdue = False  # not before: the last stream counts as open until it is closed
        async with make_channel(self.member.address, is_near=True) as channel:
            stub: Any = PrefillServiceStub(channel) if self.is_prefill else DecodeServiceStub(channel)
            call = stub.Session()
            watchdog = Watchdog(self._lease_s, call.cancel, self._set_overdue)
            async with writing(call, self._commands, f"writer {self.key}"):
                try:
                    async for message in call:
                        watchdog.heard()
                        self.receive(message)
                except asyncio.CancelledError:
                    if not watchdog.has_fired or self._is_closed():
                        raise
                    raise WorkerLostError(f"worker {self.key} was silent for {self._lease_s:g} s") from None
                finally:
                    watchdog.stop()

    def receive(self, message: Any) -> None:
        """What the worker says: its status, and events in order."""
        has_changed = False
        if message.HasField("status"):
            was_leaving, self.status = self.is_leaving, message.status
            has_changed = self._known.hear(_report(message)) or self.is_leaving != was_leaving
            self._tell_leaving(was_leaving)
        for event in message.events:
            kind = event.WhichOneof("event")
            if kind == "token" or kind == "first_token":
                self._take_token(getattr(event, kind))
            elif kind is not None:  # `None`: of a later version
                self._take(getattr(event, kind))
        if message.HasField("status"):
            # Behind the events: the first of a stream is the hello, which says whose figures these are.
            if has_changed:
                self._observer.load_changed(self)
            self._observer.status_reported(self, message.status)

    def _take_token(self, token: Token) -> None:
        if (mailbox := self._held.get(token.request_id)) is not None:
            mailbox.put(wire.token_from_proto(token))

    def _take(self, message: Any) -> None:
        if isinstance(message, WorkerInfo):
            self._greet(message)
            return
        if isinstance(message, CachedPages):
            self._observer.pages_cached(self, message)
            return
        happened = wire.event_from_proto(message, self.key)
        if happened is not None and (mailbox := self._held.get(message.request_id)) is not None:
            mailbox.put(happened)
        self._observer.event_seen(message)

    def _greet(self, info: WorkerInfo) -> None:
        if (info.worker_id, info.incarnation) != self.key or info.role != self.member.role:
            raise WorkerLostError(
                f"{self.member.address} answers as {info.worker_id}/{info.incarnation}, not as {self.key}"
            )
        protocol = agree(Protocols(), "this router", protocols_of(info), str(self.key))
        self.why_unreached = ""
        self.info = info
        self.kv_format = kv_format(info)
        _log.info(
            "worker %s connected at %s as process %d, by protocol %d", self.key, self.member.address, info.pid, protocol
        )
        self._set_state(SessionState.OPEN)

    def _tell_lost(self, error: TandemError) -> None:
        held, self._held = self._held, {}
        self._known.clear()
        self._observer.load_changed(self)
        for mailbox in held.values():
            mailbox.put(WorkerLost(self.key, error, self.is_leaving))

    def _tell_leaving(self, was_leaving: bool) -> None:
        """If it begins to drain, tell the requests that a decode worker holds: they are to go on elsewhere."""
        if was_leaving or not self.is_leaving:
            return
        _log.info("worker %s leaves; it holds %d requests", self.key, len(self._held))
        if not self.is_prefill:
            for mailbox in list(self._held.values()):
                mailbox.put(DecodeLeaves(self.key))

    def _set_overdue(self, silent_since_s: float | None) -> None:
        self._is_overdue = silent_since_s is not None
        self._observer.readiness_changed(self)
        if silent_since_s is None:
            return
        _log.warning("nothing is heard of worker %s: nothing new goes there until it is", self.key)
        for mailbox in list(self._held.values()):
            mailbox.put(WorkerSilent(self.key, silent_since_s))

    def _note_death(self) -> None:
        if not self._has_died and not self.is_leaving:
            self._has_died = True
            self._observer.worker_died(self)

    def _is_closed(self) -> bool:
        return self.state is SessionState.CLOSED

    def _set_state(self, state: SessionState) -> None:
        if state is not self.state:
            self.state = state
            self._observer.session_changed(self)


def _report(message: Any) -> Report:
    status, pages = message.status, message.status.pages
    return Report(
        num_active=status.num_running + status.num_queued + status.num_incoming,
        num_queued_tokens=status.num_queued_tokens,
        num_available_pages=pages.free + pages.cached,
        num_stepping=status.num_running,
        num_commands=message.num_commands if message.HasField("num_commands") else None,
        prompt_steps=prompt_steps_from_proto(status.prompt_steps),
    )
