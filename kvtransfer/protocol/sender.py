"""The sender's half of the handoff: when pages may be posted, and when they may be released.

    WAITING ──attached──> SENDING ──every extent written──> COMMITTED ──ack──> DONE
       │                     │                                  │
       └───────failed────────┼─────failed, nothing outstanding──┴────────────> DONE
                             └─────failed────> DRAINING ──all settled────────> DONE

It may compute before the grant, never post. What is sealed is posted batch by batch, as its turn on the link to the
receiver comes (`kvtransfer.protocol.link`), so a failure finds little under way. A batch counts as outstanding from the
instruction to post it until the transport has settled it. Whole pages that are written while others are still computed
are told to the receiver as parts, so that it has them should this attempt fail. Source pages are released on the
acknowledgement or, after a failure, when no outstanding write can still read them. An attempt that ends without an
acknowledgement confirms to the receiver that nothing is outstanding: that is the fence for the pages over there.

Pure: no I/O, no clock; `handle(event, now_s)` returns instructions. Not thread-safe, but for `may_post`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvtransfer.layout import differences
from kvtransfer.protocol import sender_events as ev
from kvtransfer.protocol.arrivals import ExtentRun
from kvtransfer.protocol.attempts import SenderState
from kvtransfer.protocol.capability import is_capability_of
from kvtransfer.protocol.messages import Commit, CommitPart, FailureReason, Grant, RefusalReason
from kvtransfer.protocol.sender_pages import SenderPages


class SenderHandoff(SenderPages):
    """One attempt at moving one request's pages; see `SenderPages`."""

    # ---- the one entrance

    def handle(self, event: ev.SenderEvent, now_s: float) -> list[ev.SenderInstruction]:
        """Take in one event and return what is to be done, in order.

        Raises:
            IllegalTransitionError: a local event that the table does not allow: a defect of the worker. Nothing
                that a peer or the network does raises.
        """
        self._out = []
        handler = TRANSITIONS.get((self.state, type(event)))
        if handler is None:
            raise self._illegal(f"{type(event).__name__} is not legal here")
        handler(self, event, now_s)
        return self._out

    # ---- posting

    def _attach(self, event: ev.GrantAttached, now_s: float) -> None:
        grant = event.grant
        if grant.key != self.key:
            raise self._illegal(f"grant {grant.grant_id} is for {grant.key}")
        self.grant = grant
        self._parted = grant.first_page
        if grant.first_page:
            self._sealed.send_from(grant.first_page)
        self._lease_ends_s = event.lease_ends_s
        self._move(SenderState.SENDING)
        names = differences(grant.layout, self.layout)
        num_granted = grant.first_page + len(grant.pages)
        if names:
            self._give_up(FailureReason.GRANT_MISMATCH, f"receiver's layout differs in {', '.join(names)}")
        elif num_granted != self.num_pages:
            self._give_up(FailureReason.GRANT_MISMATCH, f"pages for {num_granted} of {self.num_pages} pages")
        elif self._has_lease(now_s):
            self._unposted.add(self._sealed.from_page(grant.first_page))
            self._commit_when_written(now_s)

    def _seal(self, event: ev.PagesSealed, now_s: float) -> None:
        fresh = self._take_sealed(event)
        if self.grant is not None and self._has_lease(now_s):
            self._unposted.add(_from_page(fresh, self.grant.first_page))

    def _seal_again(self, event: ev.PagesSealed, _: float) -> None:
        if self._take_sealed(event):
            raise self._illegal("pages were sealed after everything was written")

    def _has_lease(self, now_s: float) -> bool:
        """Whether the grant holds; else it is given up."""
        if not self.may_post(now_s):
            self._give_up(FailureReason.LEASE_LOST, "the lease ran out")
            return False
        return True

    def _take_room(self, event: ev.RoomGiven, now_s: float) -> None:
        """Post one batch, of an extent at least."""
        if self.grant is None or not self._unposted.num_extents or not self._has_lease(now_s):
            return
        most, least = (
            max(1, num_bytes // self.layout.extent_bytes)
            for num_bytes in (min(event.num_bytes, self.limits.batch_bytes), self.limits.last_batch_bytes)
        )
        self._post_batch(self.grant, self._unposted.cut(most, least))

    # ---- what became of a batch

    def _completed(self, event: ev.WriteCompleted, now_s: float) -> None:
        self._require_issued(event.write_id)
        batch = self._outstanding.pop(event.write_id, None)
        if batch is not None:
            self._written.add(batch.runs)
            self._commit_part()
            self._commit_when_written(now_s)

    def _failed(self, event: ev.WriteFailed, _: float) -> None:
        self._require_issued(event.write_id)
        if event.settled:
            self._outstanding.pop(event.write_id, None)
        reason = FailureReason.LINK_BROKEN if event.is_link_broken else FailureReason.WRITE_FAILED
        self._give_up(reason, event.error)

    def _overdue(self, event: ev.WriteOverdue, _: float) -> None:
        self._give_up(FailureReason.WRITE_TIMEOUT, event.detail)

    def _settled_late(self, event: ev.WriteCompleted | ev.WriteFailed, _: float) -> None:
        self._require_issued(event.write_id)
        if isinstance(event, ev.WriteCompleted) or event.settled:
            self._outstanding.pop(event.write_id, None)
            self._drain()

    def _link_closed(self, _: ev.LinkClosed, __: float) -> None:
        if not self._outstanding:
            return
        self._outstanding.clear()
        if self.state is SenderState.DRAINING:
            self._drain()
        else:
            self._give_up(FailureReason.LINK_BROKEN, "the connection was closed")

    # ---- committing

    def _computed(self, event: ev.AllComputed, now_s: float) -> None:
        self._all_computed = event
        if self.state is SenderState.SENDING:
            self._commit_when_written(now_s)

    def _commit_part(self) -> None:
        """Tell of further whole pages at the grant's start, unless the commit is about to.

        Once the last page is sealed nothing is left to compute. That page is never in a part: it may not be full.
        """
        if self._sealed.is_complete or self._all_computed is not None:
            return
        grant = self.grant
        assert grant is not None
        end = self._written.end_of_run(self._parted, self.num_pages - 1)
        if end == self._parted:
            return
        part = CommitPart(
            grant_id=grant.grant_id,
            key=self.key,
            epoch=grant.epoch,
            receiver=grant.receiver,
            sender=self.sender,
            first_index=self._parted - grant.first_page,
            digests=self._sealed.digests(self._parted, end),
            capability=grant.capability,
        )
        self._parted = end
        self._out.append(ev.SendCommitPart(part))

    def _commit_when_written(self, now_s: float) -> None:
        if self.state is not SenderState.SENDING or self._all_computed is None:
            return
        if self._unposted.num_extents or self._outstanding:
            return
        grant = self.grant
        assert grant is not None
        missing = self._written.missing(grant.first_page, self.num_pages)
        if missing:
            self._give_up(FailureReason.INCOMPLETE, f"{len(missing)} extents were never sealed, first {missing[0]}")
            return
        self._commit = Commit(
            grant_id=grant.grant_id,
            key=self.key,
            epoch=grant.epoch,
            receiver=grant.receiver,
            sender=self.sender,
            layout=self.layout,
            pages=grant.pages,
            digests=self._sealed.digests(grant.first_page, self.num_pages),
            first_tokens=self._all_computed.first_tokens,
            capability=grant.capability,
        )
        self._committed_s = now_s
        self._move(SenderState.COMMITTED)
        self._send_commit(now_s)

    def _send_commit(self, now_s: float) -> None:
        assert self._commit is not None
        self._sent_s = now_s
        self._out.append(ev.SendCommit(self._commit))

    def _acknowledged(self, event: ev.AckReceived, _: float) -> None:
        if self.grant is None or event.grant_id != self.grant.grant_id:
            return  # about a grant this attempt does not use
        self._move(SenderState.DONE)
        self._release(self._held)
        self._out.append(ev.Succeed(self.key))

    # ---- giving up

    def _give_up(self, reason: FailureReason, detail: str = "", refusal: RefusalReason | None = None) -> None:
        retryable = refusal.retryable if refusal is not None else reason.retryable
        self._out.append(ev.Fail(self.key, reason, retryable, detail, refusal))
        self._move(SenderState.DRAINING)
        self._unposted.clear()
        busy = self._busy_pages()
        if busy:
            self._out.append(ev.QuarantinePages(self.key, tuple(sorted(busy))))
        self._drain()

    def _drain(self) -> None:
        """Release what no outstanding write can read; end when there is none."""
        self._release(self._held - self._busy_pages())
        if self._outstanding:
            return
        self._move(SenderState.DONE)
        if self.grant is not None:
            self._confirm_idle(self.grant)

    def _confirm_idle(self, of: Grant | ev.StopAsked) -> None:
        self._out.append(ev.ConfirmIdle(self.key, of.grant_id, of.receiver, of.capability))

    def _cancelled(self, _: ev.CancelRequested, __: float) -> None:
        self._give_up(FailureReason.CANCELLED)

    def _refused(self, event: ev.RefusalReceived, _: float) -> None:
        self._give_up(FailureReason.REFUSED, event.detail or event.reason.value, event.reason)

    def _acknowledged_out_of_order(self, event: ev.AckReceived, _: float) -> None:
        self._give_up(FailureReason.OUT_OF_ORDER, f"{event.grant_id} was acknowledged before its commit")

    def _receiver_exited(self, _: ev.ReceiverExited, __: float) -> None:
        self._outstanding.clear()
        self._give_up(FailureReason.RECEIVER_EXITED)

    def _receiver_exited_late(self, _: ev.ReceiverExited, __: float) -> None:
        self._outstanding.clear()
        self._drain()

    def _stop_asked(self, event: ev.StopAsked, _: float) -> None:
        """The receiver may withdraw a grant before this worker has heard that it is attached. So the stop is believed
        as it comes while there is no grant here; after that it must carry the grant's capability."""
        is_ours = event.receiver == self.receiver if self.grant is None else event.grant_id == self.grant.grant_id
        if not is_ours:
            self._confirm_idle(event)  # a grant this attempt never used
        elif self.grant is None:
            self._give_up(FailureReason.STOP_ASKED, "the receiver withdrew the grant")
            self._confirm_idle(event)
        elif is_capability_of(self.grant, event.capability):
            self._give_up(FailureReason.STOP_ASKED, "the receiver withdrew the grant")
        else:
            self._out.append(ev.IgnoreStop(event.grant_id))

    def _stop_asked_when_done(self, event: ev.StopAsked, _: float) -> None:
        self._confirm_idle(event)

    def _attached_too_late(self, event: ev.GrantAttached, _: float) -> None:
        if self.grant is None:
            self.grant = event.grant
            if self.state is SenderState.DONE:
                self._confirm_idle(event.grant)

    # ---- time

    def _extend(self, event: ev.LeaseExtended, _: float) -> None:
        if self.grant is not None and event.grant_id == self.grant.grant_id:
            self._lease_ends_s = max(self._lease_ends_s, event.lease_ends_s)

    def _pass_time_sending(self, _: ev.Tick, now_s: float) -> None:
        self._has_lease(now_s)

    def _pass_time_committed(self, _: ev.Tick, now_s: float) -> None:
        if now_s >= self._committed_s + self.limits.answer_timeout_s:
            self._give_up(FailureReason.NO_ANSWER, f"no answer to the commit in {self.limits.answer_timeout_s} s")
        elif now_s >= self._sent_s + self.limits.resend_s:
            self._send_commit(now_s)

    def _ignore(self, event: Any, now_s: float) -> None:
        """A late or repeated message that changes nothing."""


def _from_page(runs: list[ExtentRun], first_index: int) -> list[ExtentRun]:
    """What of `runs` is in pages from `first_index` on."""
    cut = [(layer, max(first, first_index), first + num) for layer, first, num in runs]
    return [ExtentRun(layer, first, last - first) for layer, first, last in cut if first < last]


_Handler = Callable[[SenderHandoff, Any, float], None]


def _table() -> dict[tuple[SenderState, type], _Handler]:
    H = SenderHandoff
    W, S, C, R, D = (
        SenderState.WAITING, SenderState.SENDING, SenderState.COMMITTED, SenderState.DRAINING, SenderState.DONE,
    )  # fmt: skip
    rows: dict[type, dict[_Handler, tuple[SenderState, ...]]] = {
        ev.GrantAttached: {H._attach: (W,), H._ignore: (S, C), H._attached_too_late: (R, D)},
        ev.LeaseExtended: {H._extend: (S,), H._ignore: (W, C, R, D)},
        ev.PagesSealed: {H._seal: (W, S), H._seal_again: (C,), H._ignore: (R, D)},
        ev.RoomGiven: {H._take_room: (S,), H._ignore: (W, C, R, D)},
        ev.WriteCompleted: {H._completed: (S,), H._settled_late: (R,), H._ignore: (C, D)},
        ev.WriteFailed: {H._failed: (S,), H._settled_late: (R,), H._ignore: (C, D)},
        ev.LinkClosed: {H._link_closed: (S, R), H._ignore: (W, C, D)},
        ev.WriteOverdue: {H._overdue: (S,), H._ignore: (W, C, R, D)},
        ev.AllComputed: {H._computed: (W, S), H._ignore: (C, R, D)},
        ev.AckReceived: {H._acknowledged: (C,), H._acknowledged_out_of_order: (W, S), H._ignore: (R, D)},
        ev.RefusalReceived: {H._refused: (W, S, C), H._ignore: (R, D)},
        ev.CancelRequested: {H._cancelled: (W, S, C), H._ignore: (R, D)},
        ev.StopAsked: {H._stop_asked: (W, S, C), H._ignore: (R,), H._stop_asked_when_done: (D,)},
        ev.ReceiverExited: {H._receiver_exited: (W, S, C), H._receiver_exited_late: (R,), H._ignore: (D,)},
        ev.Tick: {H._pass_time_sending: (S,), H._pass_time_committed: (C,), H._ignore: (W, R, D)},
    }  # fmt: skip
    return {(s, event): handler for event, cells in rows.items() for handler, states in cells.items() for s in states}


# All and only the legal pairs of state and event.
TRANSITIONS = _table()
