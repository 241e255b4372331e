"""Drives the receiver's half of every handoff, on one thread: the transfer thread of a worker.

The driver takes the digests of a write's extents when the transport reports that the write has arrived. Later it
compares a part or a commit with these digests only. So the answer to a call is known when the call returns, and the
runner hears of an admission before the sender does.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from decode_worker.landing import IdleWord, Landing
from kvtransfer.extents import ArenaShape, PageArea, TakeDigests
from kvtransfer.layout import LayoutId
from kvtransfer.protocol import receiver_events as ev
from kvtransfer.protocol.arrivals import ArrivedDigests, WriteTag
from kvtransfer.protocol.grants import ReceiverLimits
from kvtransfer.protocol.messages import AttemptKey, Commit, CommitPart, Grant, RefusalReason
from kvtransfer.protocol.receiver import ReceiverHandoffs
from kvtransfer.transports.events import PeerId, TransportEvent, WriteArrived
from tandem.core import fault_points
from tandem.core.clock import Clock

_log = logging.getLogger(__name__)


class Incoming(Protocol):
    """The receiving side of the transport; see `kvtransfer.transports.base.Transport`."""

    def expect_incoming(self, key: str, peer: PeerId, area: PageArea | None = None) -> None: ...

    def end_incoming(self, key: str) -> None: ...

    def poll(self) -> list[TransportEvent]: ...

    def disconnect(self, peer: PeerId) -> None: ...


class AttemptsPort(Protocol):
    """The role, as the driver sees it: whose attempts these are. Called on the driver's thread."""

    def queue(self, key: AttemptKey) -> None:
        """Take the attempt into the queue for pages. `granted` or `denied` answers, now or later."""

    def grant(self, grant: Grant) -> None:
        """The protocol made this grant: tell the router."""

    def admit(self, grant: Grant, commit: Commit, committed_s: float) -> None:
        """The pages hold what was sealed; the commit arrived at `committed_s`, on the driver's clock."""

    def over(
        self,
        key: AttemptKey,
        pages: tuple[int, ...],
        verified: tuple[tuple[int, int], ...],
        reason: RefusalReason,
        *,
        quarantined: bool,
    ) -> None:
        """The attempt ended here without admission.

        Args:
            pages: those that are not verified: free, or in quarantine.
            verified: the others as (index in the grant, page), in order: they hold what was sealed, and no write can
                reach them.
        """

    def lift(self, pages: tuple[int, ...]) -> None: ...

    def refused(self, key: AttemptKey, reason: RefusalReason, detail: str) -> None:
        """A reservation was refused."""

    def carried_out(self) -> None:
        """All instructions of one event have been carried out."""


class ReceiverCallbacks(Protocol):
    """What the driver reports to its worker. Called on the driver's thread; each call must hand over and return."""

    def ask_to_stop(self, sender: str, grant: Grant, reason: RefusalReason) -> None: ...

    def kill_writer(self, sender: str) -> None: ...

    def replace_self(self, num_quarantined: int) -> None: ...

    def deadline(self, deadline_s: float | None) -> None: ...


@dataclass(frozen=True, slots=True)
class Answer:
    """Of a call from a sender: yes, or the reason why not."""

    refusal: RefusalReason | None = None
    detail: str = ""
    verified_at_s: float = 0.0  # of a commit whose pages were verified just now, on the driver's clock


@dataclass(frozen=True, slots=True)
class _Arriving:
    """What has arrived of one grant."""

    sender: str
    digests: ArrivedDigests


class ReceiverDriver:
    """All handoffs that this worker takes.

    Args:
        take_digests: of extents of this worker's arena.
        secret: of this incarnation, for the capabilities of its grants.
    """

    def __init__(
        self,
        incarnation: str,
        layout: LayoutId,
        shape: ArenaShape,
        take_digests: TakeDigests,
        limits: ReceiverLimits,
        callbacks: ReceiverCallbacks,
        secret: bytes,
        clock: Clock,
    ) -> None:
        self._handoffs = ReceiverHandoffs(incarnation, layout, limits, secret=secret)
        self._shape = shape
        self._take_digests = take_digests
        self._callbacks = callbacks
        self._clock = clock
        self._answer = Answer()
        self._is_reserving = False  # the event under way is a reservation: who hears of a refusal differs
        self._committed_s = self._verified_at_s = 0.0  # when the commit under way arrived, and was verified
        self._transport: Incoming
        self._attempts: AttemptsPort
        self._deliver: Callable[[TransportEvent], None] = self.on_transport
        # By grant. Invariant: all and only grants with a writer that are neither admitted nor over.
        self._arriving: dict[str, _Arriving] = {}
        # Arrivals of writes that belong to no open grant of their writer, and messages without meaning.
        self.num_arrivals_ignored = 0
        self._landing = Landing(limits.grace_s)
        # Refused calls of senders, by reason, without repetitions of calls about what has ended well.
        self.refusals: Counter[RefusalReason] = Counter()

    @property
    def num_refused(self) -> int:
        return self.refusals.total()

    def bind(self, transport: Incoming, attempts: AttemptsPort, deliver: Callable[[TransportEvent], None]) -> None:
        """Give the driver its transport and role; once, on its thread. Events that it polls itself go to `deliver`."""
        self._transport, self._attempts, self._deliver = transport, attempts, deliver

    # -- what others say

    def attach(self, grant_id: str, sender: str, capability: bytes, *, renew: bool) -> Answer:
        """A sender wants to write, or still does."""
        kind = ev.LeaseRenewed if renew else ev.GrantGivenOut
        return self._answer_sender(kind(grant_id, sender, capability), f"{sender}, {grant_id}")

    def commit_part(self, part: CommitPart) -> Answer:
        """A sender says that these pages are written."""
        return self._answer_sender(ev.PartReceived(part), f"{part.sender}, {part.grant_id}")

    def commit(self, commit: Commit, arrived_s: float) -> Answer:
        """A sender says that all is written; heard at `arrived_s`, on the driver's clock."""
        fault_points.reach("decode.commit")
        self._committed_s, self._verified_at_s = arrived_s, 0.0
        answer = self._answer_sender(ev.CommitReceived(commit), f"{commit.sender}, {commit.grant_id}")
        if answer.refusal is None:
            fault_points.reach("decode.verified")
        return replace(answer, verified_at_s=self._verified_at_s)

    def capability_of(self, grant_id: str) -> bytes | None:
        """The capability of this grant; `None`: the grant is unknown."""
        return self._handoffs.capability_of(grant_id)

    def confirm_idle(self, grant_id: str, sender: str, capability: bytes) -> Answer:
        """A sender says that nothing of the grant is outstanding and it will never be committed.

        If a connection of its was closed just now, that is a fence only when nothing of it can be on its way.
        """
        word = IdleWord(grant_id, sender, capability)
        return Answer() if self._landing.hold(word) else self._take_word(word)

    def _take_word(self, word: IdleWord) -> Answer:
        event = ev.WriterConfirmedIdle(word.grant_id, word.sender, word.capability)
        return self._answer_sender(event, f"{word.sender}, {word.grant_id}")

    def writer_draining(self, grant_id: str, sender: str, num_bytes: int) -> None:
        """A sender that was asked to stop answers that so many bytes of the grant are still under way."""
        self.happened(ev.WriterDraining(grant_id, sender, num_bytes))

    def _answer_sender(self, event: ev.ReceiverEvent, what: str) -> Answer:
        answer = self._ask(event)
        if answer.refusal not in (None, RefusalReason.ALREADY_ENDED):
            self.refusals[answer.refusal] += 1
            _log.warning("%s of %s is refused: %s", type(event).__name__, what, answer.refusal.value)
        return answer

    def on_transport(self, event: object) -> None:
        """When a write has arrived, read the extents that its tag names at once, while other writes are on their way.

        A tag is a hint. It counts only if it names extents of a grant that its writer has.
        """
        if not isinstance(event, WriteArrived):
            return
        try:
            tag = WriteTag.unpack(event.tag)
        except ValueError as error:
            self.ignore(event.peer, str(error))
            return
        arriving = self._arriving.get(self._handoffs.grant_id(tag.epoch))
        if arriving is None:  # it has ended meanwhile
            self.num_arrivals_ignored += 1
        elif arriving.sender != event.peer or not arriving.digests.covers(tag.runs):
            self.ignore(event.peer, f"epoch {tag.epoch} gives it no {tag.runs[:4]}")
        else:
            arriving.digests.read(tag.runs, self._take_digests)

    def ignore(self, peer: str, why: str) -> None:
        """Count and drop a message from `peer` on the KV plane that has no meaning here."""
        self.num_arrivals_ignored += 1
        _log.warning("a message from %.100r is ignored: %s", peer, why)

    def refuse_unproven(self, peer: str) -> None:
        """A call about a grant came on the KV plane, from somebody who was not given it."""
        self.refusals[RefusalReason.BAD_CAPABILITY] += 1
        _log.warning("a call of %.100r is refused: it is not sealed with its grant's capability", peer)

    # -- what the role says

    def reserve(self, key: AttemptKey) -> None:
        """A router asks for pages."""
        self.happened(ev.ReserveReceived(key))

    def granted(self, key: AttemptKey, pages: tuple[int, ...], first_page: int) -> None:
        """The pool gave `pages` to the attempt, whose prompt has `first_page` pages already. `queue` and `carried_out`
        may call this, and `denied`."""
        self._run(ev.ReservationGranted(key, pages, first_page))
        self._set_deadline()

    def denied(self, key: AttemptKey, reason: RefusalReason) -> None:
        """The attempt gets no pages."""
        self._run(ev.ReservationDenied(key, reason))
        self._set_deadline()

    def cancel(self, key: AttemptKey) -> None:
        """The attempt was cancelled."""
        self.happened(ev.RequestCancelled(key))

    def happened(self, event: ev.ReceiverEvent) -> None:
        """Any event that nobody waits for an answer to."""
        self._ask(event)

    # -- time

    def writer_exited(self, sender: str, *, is_here: bool) -> None:
        """A writer's process has ended. That is a fence as soon as none of its bytes can be on their way any more.

        Until then the transport keeps its connections, so that these bytes come in now and not at some later time.

        Args:
            is_here: it ran on this host.
        """
        self._landing.exit(sender, self._clock.now(), is_here=is_here)
        self._set_deadline()

    def link_closed(self, sender: str, *, is_here: bool) -> None:
        """The connection by which a writer wrote broke, and both ends have closed theirs; the writer lives.

        Args:
            is_here: the writer runs on this host.
        """
        self._landing.close_link(sender, self._clock.now(), is_here=is_here)
        self.happened(ev.LinkClosed(sender))

    def tick(self) -> None:
        """A deadline may have come."""
        now_s = self._clock.now()
        exited, words = self._landing.take_exited(now_s), self._landing.take_landed(now_s)
        if exited or words:
            # This thread may have been stopped for long: let bytes that have come land before their pages are freed.
            while events := self._transport.poll():
                for event in events:
                    self._deliver(event)
        for sender in exited:
            self.happened(ev.WriterExited(sender))
            self._transport.disconnect(PeerId(sender))
        for word in words:
            self._take_word(word)
        self.happened(ev.Tick())

    # -- carrying out

    def _ask(self, event: ev.ReceiverEvent) -> Answer:
        self._answer = Answer()
        self._is_reserving = isinstance(event, ev.ReserveReceived)
        self._run(event)
        self._is_reserving, answer = False, self._answer
        self._attempts.carried_out()
        self._set_deadline()
        return answer

    def _set_deadline(self) -> None:
        deadlines_s = (self._handoffs.next_deadline_s(), *self._landing.deadlines_s())
        self._callbacks.deadline(min((d for d in deadlines_s if d is not None), default=None))

    def _run(self, event: ev.ReceiverEvent) -> None:
        for instruction in self._handoffs.handle(event, self._clock.now()):
            _HANDLERS[type(instruction)](self, instruction)

    def _refuse(self, i: ev.SendRefusal) -> None:
        self._answer = Answer(i.reason, i.detail)
        # A refused reservation goes to the router; a sender that asked about a grant gets the answer.
        if i.key is not None and (i.grant_id is None or self._is_reserving):
            self._attempts.refused(i.key, i.reason, i.detail)

    def _expect(self, i: ev.ExpectWrites) -> None:
        self._transport.expect_incoming(i.grant_id, PeerId(i.sender), PageArea(i.pages, self._shape))
        self._arriving[i.grant_id] = _Arriving(i.sender, ArrivedDigests(i.pages, self._shape.num_layers))

    def _end_writes(self, i: ev.EndWrites) -> None:
        self._transport.end_incoming(i.grant_id)

    def _verify_part(self, i: ev.VerifyPart) -> None:
        mismatches = self._find_mismatches(i.grant_id, i.part.first_index, i.part.digests)
        self._run(ev.PartVerified(i.grant_id, i.part, mismatches))

    def _verify(self, i: ev.VerifyDigests) -> None:
        mismatches = self._find_mismatches(i.grant_id, 0, i.digests)
        self._verified_at_s = self._clock.now()
        self._run(ev.DigestsVerified(i.grant_id, mismatches))

    def _find_mismatches(
        self, grant_id: str, first_index: int, digests: Sequence[Sequence[int]]
    ) -> tuple[tuple[int, int], ...]:
        """As `ArrivedDigests.find_mismatches`. The log says, once, how many extents have changed since they arrived."""
        arrived = self._arriving[grant_id].digests
        num_known = arrived.num_changed
        mismatches = arrived.find_mismatches(first_index, digests, self._take_digests)
        if num_new := arrived.num_changed - num_known:
            # Either the transport reports arrivals too early, which makes commits slow, or another process writes here.
            _log.warning("%d extents of %s have changed since their writes arrived", num_new, grant_id)
        return mismatches

    def _admit(self, i: ev.AdmitRequest) -> None:
        del self._arriving[i.grant.grant_id]
        self._attempts.admit(i.grant, i.commit, self._committed_s)

    def _over(self, i: ev.FreePages | ev.QuarantinePages) -> None:
        self._arriving.pop(i.grant_id or "", None)  # none where no writer ever knew of the grant
        record = self._handoffs.record(i.key)
        reason = record.reason if record is not None and record.reason is not None else RefusalReason.CANCELLED
        self._attempts.over(i.key, i.pages, i.verified, reason, quarantined=isinstance(i, ev.QuarantinePages))


_HANDLERS: dict[type, Callable[..., None]] = {
    # A call that is not refused is answered with yes; whoever dropped a reservation refuses it as well.
    **dict.fromkeys(
        (ev.ConfirmAttached, ev.ConfirmRenewed, ev.ConfirmPart, ev.SendAck, ev.DropReservation), lambda *_: None
    ),
    ev.QueueReservation: lambda driver, i: driver._attempts.queue(i.key),
    ev.SendGrant: lambda driver, i: driver._attempts.grant(i.grant),
    ev.SendRefusal: ReceiverDriver._refuse,
    ev.ExpectWrites: ReceiverDriver._expect,
    ev.EndWrites: ReceiverDriver._end_writes,
    ev.VerifyPart: ReceiverDriver._verify_part,
    ev.VerifyDigests: ReceiverDriver._verify,
    ev.AdmitRequest: ReceiverDriver._admit,
    ev.FreePages: ReceiverDriver._over,
    ev.QuarantinePages: ReceiverDriver._over,
    ev.LiftQuarantine: lambda driver, i: driver._attempts.lift(i.pages),
    ev.AskWriterToStop: lambda driver, i: driver._callbacks.ask_to_stop(i.sender, i.grant, i.reason),
    ev.KillWriter: lambda driver, i: driver._callbacks.kill_writer(i.sender),
    ev.ReplaceSelf: lambda driver, i: driver._callbacks.replace_self(i.num_quarantined_pages),
}
