"""Drives the receiver's half of every handoff; all of it runs on the transfer thread.

Commits are verified right where they arrive, so a commit's answer is known when `commit` returns; the runner hears
of the admission before anybody else does.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from kvtransfer.digest import ReadExtent, find_mismatches
from kvtransfer.extents import ArenaShape, page_ranges
from kvtransfer.layout import LayoutId
from kvtransfer.protocol import receiver_events as ev
from kvtransfer.protocol.grants import ReceiverLimits
from kvtransfer.protocol.messages import AttemptKey, Commit, Grant, RefusalReason
from kvtransfer.protocol.receiver import ReceiverHandoffs
from kvtransfer.transports.base import PeerId, Transport


class ReceivingOutlet(Protocol):
    """Where the desk's results go. Called on the transfer thread; must hand over and return."""

    def queue(self, key: AttemptKey) -> None:
        """Answer with `granted` when the pool has pages."""

    def drop(self, key: AttemptKey) -> None: ...

    def grant(self, grant: Grant) -> None:
        """Tell the router."""

    def admit(self, grant: Grant, commit: Commit) -> None: ...

    def over(self, key: AttemptKey, pages: tuple[int, ...], reason: RefusalReason, *, quarantined: bool) -> None:
        """The attempt ended here without admission; its pages are free, or in quarantine."""

    def lift(self, pages: tuple[int, ...]) -> None: ...

    def refused(self, key: AttemptKey, reason: RefusalReason, detail: str) -> None:
        """A reservation was refused."""

    def ask_to_stop(self, sender: str, key: AttemptKey, grant_id: str, reason: RefusalReason) -> None: ...

    def kill_writer(self, sender: str) -> None: ...

    def replace_self(self, num_quarantined: int) -> None: ...

    def deadline(self, deadline_s: float | None) -> None: ...


@dataclass(frozen=True, slots=True)
class Answer:
    """Of a call from a sender: yes, or the reason why not."""

    refusal: RefusalReason | None = None
    detail: str = ""


class ReceivingDesk:
    """All handoffs that this worker takes.

    Args:
        read_extent: reads this worker's arena, for the digests.
        transport: the transport of this thread.
    """

    def __init__(
        self,
        incarnation: str,
        layout: LayoutId,
        shape: ArenaShape,
        read_extent: ReadExtent,
        limits: ReceiverLimits,
        outlet: ReceivingOutlet,
    ) -> None:
        self._handoffs = ReceiverHandoffs(incarnation, layout, limits)
        self._shape = shape
        self._read_extent = read_extent
        self._outlet = outlet
        self._answer = Answer()
        self._is_reserving = False  # the event under way is a reservation: who hears of a refusal differs
        self._transport: Transport | None = None
        self.num_refused = 0

    def bind(self, transport: Transport) -> None:
        """Give it the transport; once, on the transfer thread."""
        self._transport = transport

    # -- what others say

    def attach(self, grant_id: str, sender: str, *, renew: bool) -> Answer:
        """A sender wants to write, or still does."""
        if not renew:
            return self._ask(ev.GrantGivenOut(grant_id, sender))
        if not self._is_writer(grant_id, sender):
            return Answer(RefusalReason.WRONG_SENDER)
        return self._ask(ev.LeaseRenewed(grant_id))

    def commit(self, commit: Commit) -> Answer:
        """A sender says that all is written."""
        answer = self._ask(ev.CommitReceived(commit))
        self.num_refused += answer.refusal is not None
        return answer

    def confirm_idle(self, grant_id: str, sender: str) -> None:
        """A sender says that nothing of the grant is outstanding and it will never be committed."""
        if self._is_writer(grant_id, sender):
            self.happened(ev.WriterConfirmedIdle(grant_id))

    def happened(self, event: ev.ReceiverEvent) -> None:
        """Any event that nobody waits for an answer to."""
        self._ask(event)

    def _is_writer(self, grant_id: str, sender: str) -> bool:
        """Whether nobody else is known to write into this grant."""
        records = (r for r in self._handoffs.records() if r.grant is not None and r.grant.grant_id == grant_id)
        return all(r.sender in (None, sender) for r in records)

    def tick(self) -> None:
        self.happened(ev.Tick())

    # -- carrying out

    def _ask(self, event: ev.ReceiverEvent) -> Answer:
        self._answer = Answer()
        self._is_reserving = isinstance(event, ev.ReserveReceived)
        self._run(event)
        self._outlet.deadline(self._handoffs.next_deadline_s())
        return self._answer

    def _run(self, event: ev.ReceiverEvent) -> None:
        for instruction in self._handoffs.handle(event, time.monotonic()):
            self._carry_out(instruction)

    def _carry_out(self, instruction: ev.ReceiverInstruction) -> None:
        handler: Callable[[ReceivingDesk, ev.ReceiverInstruction], None] = _HANDLERS[type(instruction)]
        handler(self, instruction)

    def _refuse(self, i: ev.SendRefusal) -> None:
        self._answer = Answer(i.reason, i.detail)
        # Of a reservation the router hears; who asked with a grant gets the answer.
        if i.key is not None and (i.grant_id is None or self._is_reserving):
            self._outlet.refused(i.key, i.reason, i.detail)

    def _agree(self, _: ev.ReceiverInstruction) -> None:
        self._answer = Answer()

    def _expect(self, i: ev.ExpectWrites) -> None:
        assert self._transport is not None
        ranges = page_ranges(i.pages, self._shape)
        self._transport.expect_incoming(i.grant_id, PeerId(i.sender) if i.sender else None, ranges)

    def _end_writes(self, i: ev.EndWrites) -> None:
        assert self._transport is not None
        self._transport.end_incoming(i.grant_id)

    def _verify(self, i: ev.VerifyDigests) -> None:
        self._run(ev.DigestsVerified(i.grant_id, find_mismatches(self._read_extent, i.pages, i.digests)))

    def _over(self, i: ev.FreePages | ev.QuarantinePages) -> None:
        record = self._handoffs.record(i.key)
        reason = record.reason if record is not None and record.reason is not None else RefusalReason.CANCELLED
        self._outlet.over(i.key, i.pages, reason, quarantined=isinstance(i, ev.QuarantinePages))

    def _ask_to_stop(self, i: ev.AskWriterToStop) -> None:
        if i.sender is not None:  # without a sender nobody was ever allowed to post
            self._outlet.ask_to_stop(i.sender, i.key, i.grant_id, i.reason)


_HANDLERS: dict[type, Callable[..., None]] = {
    ev.QueueReservation: lambda desk, i: desk._outlet.queue(i.key),
    ev.DropReservation: lambda desk, i: desk._outlet.drop(i.key),
    ev.SendGrant: lambda desk, i: desk._outlet.grant(i.grant),
    ev.ConfirmAttached: ReceivingDesk._agree,
    ev.ConfirmRenewed: ReceivingDesk._agree,
    ev.SendAck: ReceivingDesk._agree,
    ev.SendRefusal: ReceivingDesk._refuse,
    ev.ExpectWrites: ReceivingDesk._expect,
    ev.EndWrites: ReceivingDesk._end_writes,
    ev.VerifyDigests: ReceivingDesk._verify,
    ev.AdmitRequest: lambda desk, i: desk._outlet.admit(i.grant, i.commit),
    ev.FreePages: ReceivingDesk._over,
    ev.QuarantinePages: ReceivingDesk._over,
    ev.LiftQuarantine: lambda desk, i: desk._outlet.lift(i.pages),
    ev.AskWriterToStop: ReceivingDesk._ask_to_stop,
    ev.KillWriter: lambda desk, i: desk._outlet.kill_writer(i.sender),
    ev.ReplaceSelf: lambda desk, i: desk._outlet.replace_self(i.num_quarantined_pages),
}
