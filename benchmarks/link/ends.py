"""The two ends of a handoff without a model: arena, transport and drivers as in the workers.

Pages hold what they hold; their digests are real. What gRPC carries between workers goes over a connection of the
standard library here (`benchmarks.link.control`). Commits go behind the pages where the transport carries messages.
"""

from __future__ import annotations

import itertools
import os
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from decode_worker.receiver_driver import Answer, ReceiverDriver
from kvtransfer.digest import digests_of
from kvtransfer.extents import ArenaShape, PageArea, PageWrite, merge_extents
from kvtransfer.layout import LayoutId
from kvtransfer.protocol import sender_events as ev
from kvtransfer.protocol.attempts import SenderLimits
from kvtransfer.protocol.grants import ReceiverLimits
from kvtransfer.protocol.messages import AttemptKey, Commit, CommitPart, Grant, RefusalReason
from kvtransfer.transfer_thread import TransferThread
from kvtransfer.transports.base import Transport
from kvtransfer.transports.events import MessageArrived, PeerId, ThreadEvent, WriteCompleted, WriteFailed, WritePosted
from kvtransfer.transports.registry import create_transport
from prefill_worker.events import HandoffStats
from prefill_worker.links import LinkFigures
from prefill_worker.sender_driver import SenderDriver
from prefill_worker.sending import SealedPages
from tandem.core.clock import MonotonicClock
from tandem.core.errors import HandoffError, TransportError
from tandem.engine.arena import KVArena
from tandem.engine.layout import KVLayout
from tandem.worker.wire import call_from_message, call_to_message

LEASE_S = 10.0
_GRACE_S = 5.0
_WEIGHTS = "none"

#: From the receiver to the sender, of itself: to which commit or part it is an answer, and what it is.
Answered = tuple[AttemptKey, str, Answer]


@dataclass(frozen=True, slots=True)
class Described:
    """How the other side reaches an arena."""

    agent_name: str
    metadata: bytes
    shape: ArenaShape


class End:
    """An arena with a transport over it, driven by its own thread; use as `with`."""

    def __init__(self, layout: KVLayout, num_pages: int, transport: str, host: str) -> None:
        self.layout = LayoutId(weights_sha256=_WEIGHTS, **asdict(layout))
        self.arena = KVArena(layout, num_pages)
        self.arena.tensor.fill_(1)  # memory that nobody has touched is cleared at its first use, beside the writes
        self.shape = ArenaShape(layout.num_layers, num_pages, layout.extent_bytes)
        self.incarnation = f"link-{os.getpid()}-{time.monotonic_ns()}"
        self.clock = MonotonicClock()
        made = create_transport(transport, self.incarnation, host=host)
        self.error: BaseException | None = None  # what broke here, beside the handoffs
        self.transfer = TransferThread(made, self.on_event, self._fail)
        self._deadline_s: float | None = None
        self._has_ended = threading.Event()
        self._ticker = threading.Thread(target=self._tick, daemon=True)

    def __enter__(self) -> Any:
        self.transfer.start()
        metadata = self.transfer.submit(self._register).result()
        self.described = Described(self.incarnation, metadata, self.shape)
        self._ticker.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._has_ended.set()
        self._ticker.join()
        self.transfer.stop()

    def _register(self, transport: Transport) -> bytes:
        transport.register(self.arena.base_address, self.arena.num_bytes, owner=self.arena.tensor)
        return transport.metadata()

    def _fail(self, error: BaseException) -> None:
        self.error = error

    def deadline(self, deadline_s: float | None) -> None:
        """The driver's next one."""
        self._deadline_s = deadline_s

    def _tick(self) -> None:
        """A deadline is looked at ten times a second: nothing that is measured waits for one."""
        while not self._has_ended.wait(0.1):
            if self._deadline_s is not None and self._deadline_s <= self.clock.now():
                self.ask(lambda _: self.tick()).result()

    def ask(self, command: Callable[[Transport], Any]) -> Any:
        """Run on the transfer thread; a future."""
        return self.transfer.submit(command)

    def on_event(self, event: ThreadEvent) -> None:
        raise NotImplementedError

    def tick(self) -> None:
        raise NotImplementedError

    def replace_self(self, num_quarantined: int) -> None:
        self._fail(HandoffError(f"{num_quarantined} pages are in quarantine"))


class ReceivingEnd(End):
    """Decode's: gives every attempt the first pages of its arena.

    Args:
        answer: called with the answer to each commit, on the transfer thread.
    """

    def __init__(self, *made: Any, answer: Callable[[Answered], None]) -> None:
        super().__init__(*made)
        self._tell = answer
        self._num_pages: dict[AttemptKey, int] = {}
        self._grants: dict[AttemptKey, Grant] = {}
        self.driver = ReceiverDriver(
            self.incarnation,
            self.layout,
            self.shape,
            digests_of(self.arena.extent_view),
            ReceiverLimits(lease_s=LEASE_S, grace_s=_GRACE_S),
            self,
            secrets.token_bytes(32),
            self.clock,
        )

    def pair(self, other: Described) -> None:
        """Learn the sender."""

        def connect(transport: Transport) -> None:
            transport.connect(other.metadata)
            self.driver.bind(transport, self, self.on_event)

        self.ask(connect).result()

    def on_event(self, event: ThreadEvent) -> None:
        if not isinstance(event, MessageArrived):
            self.driver.on_transport(event)
            return
        call = call_from_message(event.content)
        said = call.opened(self.driver.capability_of(call.grant_id))
        if said is None:
            self.driver.refuse_unproven(event.peer)
        else:
            self.hear(said)

    def hear(self, said: Commit | CommitPart) -> None:
        """On the transfer thread."""
        if isinstance(said, CommitPart):
            answer = self.driver.commit_part(said)
        else:
            answer = self.driver.commit(said, self.clock.now())
        if isinstance(said, Commit) or answer.refusal is not None:
            self._tell((said.key, said.grant_id, answer))

    def tick(self) -> None:
        self.driver.tick()

    # -- what the sender asks for

    def reserve(self, key: AttemptKey, num_pages: int) -> Grant:
        """Pages for one attempt."""

        def reserve(_: Transport) -> Grant:
            self._num_pages[key] = num_pages
            self.driver.reserve(key)
            return self._grants.pop(key)

        grant: Grant = self.ask(reserve).result()
        return grant

    def attach(self, grant_id: str, sender: str, capability: bytes, renew: bool) -> Answer:
        answer: Answer = self.ask(lambda _: self.driver.attach(grant_id, sender, capability, renew=renew)).result()
        return answer

    def confirm_idle(self, grant_id: str, sender: str, capability: bytes) -> Answer:
        answer: Answer = self.ask(lambda _: self.driver.confirm_idle(grant_id, sender, capability)).result()
        return answer

    def expect_raw(self, sender: str) -> None:
        """Poll until `end_raw`: raw writes come."""
        area = PageArea(range(self.shape.num_pages), self.shape)
        self.ask(lambda transport: transport.expect_incoming("raw", PeerId(sender), area)).result()

    def end_raw(self) -> None:
        self.ask(lambda transport: transport.end_incoming("raw")).result()

    # -- what the driver asks for (AttemptsPort, ReceiverCallbacks)

    def queue(self, key: AttemptKey) -> None:
        self.driver.granted(key, tuple(range(self._num_pages.pop(key))), 0)

    def grant(self, grant: Grant) -> None:
        self._grants[grant.key] = grant

    def admit(self, grant: Grant, commit: Commit, committed_s: float) -> None:
        """The pages are right; they are given out again."""

    def over(self, key: AttemptKey, *_: Any, **__: Any) -> None:
        """It failed: the sender's side says why."""

    def lift(self, pages: tuple[int, ...]) -> None: ...

    def refused(self, key: AttemptKey, reason: RefusalReason, detail: str) -> None: ...

    def carried_out(self) -> None: ...

    def ask_to_stop(self, sender: str, grant: Grant, reason: RefusalReason) -> None:
        self._fail(HandoffError(f"{sender} is asked to stop {grant.grant_id}: {reason.value}"))

    def kill_writer(self, sender: str) -> None:
        self._fail(HandoffError(f"{sender} did not stop"))


class SendingEnd(End):
    """Prefill's: its prompts are the first pages of its arena, in order.

    Args:
        say: sends what no message carried, as the workers' stream does.
        confirm: tells the receiver that nothing of a grant is outstanding.
    """

    def __init__(
        self,
        *made: Any,
        say: Callable[[Commit | CommitPart], None],
        confirm: Callable[[ev.ConfirmIdle], None],
    ) -> None:
        super().__init__(*made)
        self._say = say
        self._confirm = confirm
        self._peer: tuple[PeerId, ArenaShape] | None = None
        self._transport: Transport
        self._over: dict[AttemptKey, Any] = {}  # a waiting event, then the outcome
        self._raw: dict[bytes, Any] = {}
        self._numbers = itertools.count()
        self.driver = SenderDriver(
            incarnation=self.incarnation,
            layout=self.layout,
            shape=self.shape,
            take_digests=digests_of(self.arena.extent_view),
            limits=SenderLimits(grace_s=_GRACE_S),
            callbacks=self,
            write=self.transfer.write,
            peer=lambda _: self._peer,
            clock=self.clock,
        )

    def pair(self, other: Described) -> None:
        """Learn the receiver."""

        def connect(transport: Transport) -> None:
            self._transport = transport
            self._peer = (transport.connect(other.metadata), other.shape)

        self.ask(connect).result()

    def on_event(self, event: ThreadEvent) -> None:
        if isinstance(event, WritePosted | WriteCompleted | WriteFailed) and event.handle.tag in self._raw:
            if not isinstance(event, WritePosted):
                self._raw.pop(event.handle.tag).put(event)
        else:
            self.driver.on_transport(event)

    def tick(self) -> None:
        self.driver.tick()

    # -- raw writes

    def write_raw(self, num_pages: int, done: Any) -> None:
        """One write of these pages in all layers; `done`, a queue, gets its end."""
        pages = range(num_pages)
        assert self._peer is not None
        name, there = self._peer
        writes = [PageWrite(layer, page, page) for layer in range(self.shape.num_layers) for page in pages]
        descriptors = merge_extents(writes, self.shape, there)
        tag = f"raw {next(self._numbers)}".encode()
        self._raw[tag] = done
        self.transfer.write(name, descriptors, tag)

    # -- handoffs

    def begin(self, key: AttemptKey, num_pages: int, receiver: str, over: Any) -> None:
        """`over`, a queue, gets the handoff's `HandoffStats`, or why it failed."""
        self._over[key] = over
        self.ask(lambda _: self.driver.open(key, num_pages, receiver)).result()

    def attached(self, grant: Grant, lease_ends_s: float) -> None:
        self.ask(lambda _: self.driver.attached(grant.key, grant, lease_ends_s)).result()

    def renewed(self, grant: Grant, lease_ends_s: float) -> None:
        extended = ev.LeaseExtended(grant.grant_id, lease_ends_s)
        self.ask(lambda _: self.driver.happened(grant.key, extended)).result()

    def digest(self, pages: range) -> None:
        """Take the digests of these pages, as prefill does behind some layers."""
        self.ask(lambda _: self.driver.computed_layers(range(self.shape.num_layers), pages)).result()

    def seal(self, key: AttemptKey, pages: range) -> None:
        """These pages are computed: they may go."""
        sealed = SealedPages(key, range(self.shape.num_layers), pages.start, tuple(pages))
        self.ask(lambda _: self.driver.sealed([sealed]))

    def computed(self, key: AttemptKey) -> None:
        """All are."""
        computed_s = self.clock.now()
        self.ask(lambda _: self.driver.computed(key, (), computed_s))

    def links_changed(self, links: tuple[LinkFigures, ...]) -> None:
        """The driver has learnt of the link; whoever measures it here does so by himself."""

    def link_hangs(self, receiver: str, why: str) -> None:
        """Nobody makes the connection anew here: the handoff fails."""

    def answered(self, answered: Answered) -> None:
        """What the receiver said of a commit."""
        key, grant_id, answer = answered
        if answer.refusal is not None:
            event: ev.SenderEvent = ev.RefusalReceived(answer.refusal, answer.detail)
        else:
            event = ev.AckReceived(grant_id)
        self.ask(lambda _: self.driver.happened(key, event))

    # -- what the driver says (SenderCallbacks)

    def commit_part(self, part: CommitPart) -> None:
        self._send(part)

    def commit(self, commit: Commit, *, again: bool) -> None:
        if not again:
            self._send(commit)
        else:
            self._say(commit)

    def _send(self, said: Commit | CommitPart) -> None:
        assert self._peer is not None
        if not self._transport.carries_messages:
            self._say(said)
            return
        try:
            self._transport.send(self._peer[0], call_to_message(said, self.incarnation))
        except TransportError:
            self._say(said)
            return
        if isinstance(said, Commit):  # polled until its end: that drives the message on
            self._transport.expect_incoming(str(said.key), self._peer[0])

    def confirm_idle(self, idle: ev.ConfirmIdle) -> None:
        self._confirm(idle)

    def succeeded(self, key: AttemptKey, stats: HandoffStats) -> None:
        self._over.pop(key).put(stats)

    def failed(self, failure: ev.Fail) -> None:
        self._over.pop(failure.key).put(HandoffError(f"{failure.reason.value}: {failure.detail}"))

    def closed(self, key: AttemptKey) -> None:
        self._transport.end_incoming(str(key))

    def quarantine(self, pages: Sequence[int]) -> None: ...

    def release(self, pages: Sequence[int]) -> None: ...
