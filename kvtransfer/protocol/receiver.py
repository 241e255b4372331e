"""The receiver's half of the handoff: who may write which pages, and when they are free again.

    WAITING ──> GRANTED ──> OPEN ──> VERIFYING ──> ADMITTED
                   │          │          ├───────> REFUSED        digests differ
                   │          │          └─> ABANDONED ──> REFUSED   cancelled while its pages are read
                   │          └─> QUARANTINED ──fence──> REFUSED
                   └─────────────────────────────> REFUSED        nobody ever knew of the pages

Pages leave a grant by exactly one of `AdmitRequest`, `FreePages` and `QuarantinePages` → `LiftQuarantine`. From OPEN
on, they are freed only behind a fence: the writer's own word that nothing is outstanding (a commit says so too), or
its exit. A lost lease, a cancel or a missed heartbeat is none. A part is the writer's word for its pages alone: once
verified they need no fence any more, and outlive an attempt that fails.

What a sender says counts only with the grant's capability, also when it is repeated and after the end.

Pure: no I/O, no clock; `handle(event, now_s)` returns instructions. Not thread-safe.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from kvtransfer.layout import LayoutId
from kvtransfer.protocol import receiver_events as ev
from kvtransfer.protocol.capability import make_capability
from kvtransfer.protocol.grant_book import GrantBook
from kvtransfer.protocol.grants import GrantRecord, GrantState, ReceiverLimits, find_part_problem, find_problem
from kvtransfer.protocol.messages import AttemptKey, Grant, RefusalReason
from tandem.core.errors import IllegalTransitionError


class ReceiverHandoffs(GrantBook):
    """The handoffs of one decode worker; see `GrantBook`.

    Args:
        secret: this incarnation's own, at random; grants' capabilities are made with it. At least 16 bytes.
    """

    def __init__(
        self, incarnation: str, layout: LayoutId, limits: ReceiverLimits | None = None, *, secret: bytes
    ) -> None:
        if len(secret) < 16:
            raise ValueError("a secret of fewer than 16 bytes can be guessed")
        super().__init__(incarnation, layout, limits)
        self._secret = secret
        self._epoch = 0

    def grant_id(self, epoch: int) -> str:
        """Of this incarnation's grant with this epoch."""
        return f"{self.incarnation}/{epoch}"

    # ---- the one entrance

    def handle(self, event: ev.ReceiverEvent, now_s: float) -> list[ev.ReceiverInstruction]:
        """Take in one event and return what is to be done, in order.

        Raises:
            IllegalTransitionError: a local event that the table does not allow: a defect of the worker. Nothing
                that a peer or the network does raises.
        """
        self._out = []
        match event:
            case ev.Tick():
                self._tick(now_s)
            case ev.WriterExited() | ev.LinkClosed():
                self._kill_asked_s.pop(event.sender, None)
                for record in [r for r in self._live.values() if r.sender == event.sender]:
                    self._transition(record, event, now_s)
            case ev.ReserveReceived() if event.key not in self._records:
                self._open_record(event.key, now_s)
            case ev.RequestCancelled() if event.key not in self._records:
                # The cancel overtook its Reserve: remember it, so that the Reserve takes no pages.
                self._move(self._new_record(event.key, now_s), GrantState.REFUSED, now_s, RefusalReason.CANCELLED)
            case _:
                found = self._find(event)
                if found is not None:
                    self._transition(found, event, now_s)
        self._check_quarantine(now_s)
        return self._out

    def _find(self, event: Any) -> GrantRecord | None:
        match event:
            case ev.CommitReceived():
                return self._find_committed(event.commit)
            case ev.PartReceived():
                return self._find_committed(event.part)
            case ev.GrantGivenOut() | ev.LeaseRenewed() | ev.WriterConfirmedIdle():
                return self._find_written(event)
            case ev.PartVerified():
                return self._by_grant.get(event.grant_id)  # `None`: the grant ended long ago
            case ev.WriterDraining():
                asked = self._by_grant.get(event.grant_id)
                return asked if asked is not None and asked.sender == event.sender else None
            case ev.ReservationDenied():
                return self._records.get(event.key)  # `None`: cancelled, refused and forgotten meanwhile
            case ev.DigestsVerified():
                found = self._by_grant.get(event.grant_id)
            case _:
                found = self._records.get(event.key)
        if found is None:
            raise IllegalTransitionError(f"{event} concerns no attempt known to {self.incarnation}")
        return found

    def _open_record(self, key: AttemptKey, now_s: float) -> None:
        attempts = self._attempts.get(key.request_id, [])
        if attempts and key.attempt < attempts[-1]:
            self._out.append(ev.SendRefusal(key, None, RefusalReason.STALE_ATTEMPT))
            return
        for attempt in list(attempts):
            older = self._records[AttemptKey(key.request_id, attempt)]
            self._transition(older, ev.RequestCancelled(older.key), now_s, RefusalReason.STALE_ATTEMPT)
        self._new_record(key, now_s)
        self._out.append(ev.QueueReservation(key))

    # ---- transitions

    def _transition(
        self, record: GrantRecord, event: Any, now_s: float, reason: RefusalReason = RefusalReason.CANCELLED
    ) -> None:
        handler = TRANSITIONS.get((record.state, type(event)))
        if handler is None:
            history = " → ".join([*record.history, record.state.value])
            raise IllegalTransitionError(
                f"grant of {record.key}: {type(event).__name__} is not legal here; history: {history}",
                request_id=record.key.request_id,
            )
        handler(self, record, event, now_s, reason)

    # ---- what each event does, by state (see TRANSITIONS)

    def _grant(self, record: GrantRecord, event: ev.ReservationGranted, now_s: float, _: RefusalReason) -> None:
        self._epoch += 1
        grant = Grant(
            grant_id=self.grant_id(self._epoch),
            key=record.key,
            epoch=self._epoch,
            receiver=self.incarnation,
            layout=self.layout,
            pages=event.pages,
            lease_s=self.limits.lease_s,
            first_page=event.first_page,
        )
        record.grant = grant = replace(grant, capability=make_capability(grant, self._secret))
        self._by_grant[grant.grant_id] = record
        record.lease_ends_s = now_s + self.limits.lease_s
        self._move(record, GrantState.GRANTED, now_s)
        self._out.append(ev.SendGrant(grant))

    def _grant_too_late(self, record: GrantRecord, event: ev.ReservationGranted, _: float, __: RefusalReason) -> None:
        """Pages for an attempt that ended while it queued go straight back; no grant was ever made of them."""
        self._out.append(ev.FreePages(record.key, None, event.pages))

    def _deny(self, record: GrantRecord, event: ev.ReservationDenied, now_s: float, _: RefusalReason) -> None:
        self._move(record, GrantState.REFUSED, now_s, event.reason)
        self._refuse(record)

    def _cancel_queued(self, record: GrantRecord, _: Any, now_s: float, reason: RefusalReason) -> None:
        self._move(record, GrantState.REFUSED, now_s, reason)
        self._out.append(ev.DropReservation(record.key))
        self._refuse(record)

    def _repeat_grant(self, record: GrantRecord, _: Any, __: float, ___: RefusalReason) -> None:
        self._out.append(ev.SendGrant(record.held))

    def _repeat_refusal(self, record: GrantRecord, _: Any, __: float, ___: RefusalReason) -> None:
        self._refuse(record)

    def _repeat_ack(self, record: GrantRecord, _: Any, __: float, ___: RefusalReason) -> None:
        self._out.append(ev.SendAck(record.key, record.held.grant_id))

    def _attach(self, record: GrantRecord, event: ev.GrantGivenOut, now_s: float, _: RefusalReason) -> None:
        grant = record.held
        record.sender = event.sender
        record.lease_ends_s = now_s + self.limits.lease_s
        self._move(record, GrantState.OPEN, now_s)
        self._out.append(ev.ExpectWrites(grant.grant_id, event.sender, grant.pages))
        self._out.append(ev.ConfirmAttached(grant, event.sender))

    def _attach_again(self, record: GrantRecord, event: ev.GrantGivenOut, now_s: float, _: RefusalReason) -> None:
        record.lease_ends_s = now_s + self.limits.lease_s
        self._out.append(ev.ConfirmAttached(record.held, event.sender))

    def _refuse_ended(self, record: GrantRecord, _: Any, __: float, ___: RefusalReason) -> None:
        self._out.append(ev.SendRefusal(record.key, record.held.grant_id, RefusalReason.ALREADY_ENDED))

    def _renew(self, record: GrantRecord, _: Any, now_s: float, __: RefusalReason) -> None:
        record.lease_ends_s = now_s + self.limits.lease_s
        self._out.append(ev.ConfirmRenewed(record.held.grant_id, self.limits.lease_s))

    def _part(self, record: GrantRecord, event: ev.PartReceived, now_s: float, _: RefusalReason) -> None:
        grant, part = record.held, event.part
        problem = find_part_problem(part, grant)
        if problem is None and record.drop_contradicted(part.first_index, part.digests):
            problem = RefusalReason.DIGEST_MISMATCH, "a part says otherwise than an earlier one"
        if problem is not None:
            self._refuse_part(record, *problem, now_s)
            return
        indices = range(part.first_index, part.first_index + len(part.digests[0]))
        if all(index in record.verified for index in indices):
            self._out.append(ev.ConfirmPart(grant.grant_id))
        else:
            self._out.append(ev.VerifyPart(grant.grant_id, part, tuple(grant.pages[index] for index in indices)))

    def _part_unattached(self, record: GrantRecord, event: ev.PartReceived, now_s: float, _: RefusalReason) -> None:
        """A sender that never attached is writing: only a fence helps."""
        record.sender = event.part.sender
        self._move(record, GrantState.OPEN, now_s)
        self._out.append(ev.ExpectWrites(record.held.grant_id, record.sender, record.held.pages))
        self._refuse_part(record, RefusalReason.NOT_ATTACHED, "", now_s)

    def _refuse_part(self, record: GrantRecord, reason: RefusalReason, detail: str, now_s: float) -> None:
        """The attempt ends as with a refused commit, but the other pages may be being written."""
        self._stop(record, reason, now_s)
        self._refuse(record, detail)

    def _part_verified(self, record: GrantRecord, event: ev.PartVerified, now_s: float, _: RefusalReason) -> None:
        if event.mismatches:
            self._refuse_part(record, RefusalReason.DIGEST_MISMATCH, _describe(event.mismatches), now_s)
            return
        record.note_verified(event.part)
        self._out.append(ev.ConfirmPart(event.grant_id))

    def _commit(self, record: GrantRecord, event: ev.CommitReceived, now_s: float, _: RefusalReason) -> None:
        grant, commit = record.held, event.commit
        problem = find_problem(commit, grant)
        if problem is None and (wrong := record.drop_contradicted(0, commit.digests)):
            problem = RefusalReason.DIGEST_MISMATCH, f"{len(wrong)} pages are not what their parts said"
        if problem is not None:
            reason, detail = problem
            self._end(record, reason, now_s)
            self._refuse(record, detail)
            return
        record.commit = commit
        self._move(record, GrantState.VERIFYING, now_s)
        self._out.append(ev.EndWrites(grant.grant_id))
        # Pages of parts too: where one extent differs, all are read again, and no page is kept that has changed.
        self._out.append(ev.VerifyDigests(grant.grant_id, grant.pages, commit.digests))

    def _commit_refused(self, record: GrantRecord, _: Any, now_s: float, __: RefusalReason) -> None:
        """Too late, or without an attach; but a fence: every write has completed and none will follow."""
        self._end(record, record.reason or RefusalReason.NOT_ATTACHED, now_s)
        self._refuse(record)

    def _verified(self, record: GrantRecord, event: ev.DigestsVerified, now_s: float, _: RefusalReason) -> None:
        grant, commit = record.held, record.commit
        assert commit is not None
        if event.mismatches:
            record.drop_mismatched(event.mismatches)
            self._end(record, RefusalReason.DIGEST_MISMATCH, now_s)
            self._refuse(record, _describe(event.mismatches))
            return
        self._move(record, GrantState.ADMITTED, now_s)
        record.forget_contents()
        self._out.append(ev.AdmitRequest(grant, commit))
        self._out.append(ev.SendAck(record.key, grant.grant_id))

    def _verified_for_nobody(
        self, record: GrantRecord, event: ev.DigestsVerified, now_s: float, _: RefusalReason
    ) -> None:
        assert record.reason is not None
        record.drop_mismatched(event.mismatches)
        self._end(record, record.reason, now_s)

    def _abandon(self, record: GrantRecord, _: Any, now_s: float, reason: RefusalReason) -> None:
        self._move(record, GrantState.ABANDONED, now_s, reason)
        self._refuse(record)

    def _cancel_private(self, record: GrantRecord, _: Any, now_s: float, reason: RefusalReason) -> None:
        self._end(record, reason, now_s)

    def _cancel_open(self, record: GrantRecord, _: Any, now_s: float, reason: RefusalReason) -> None:
        self._stop(record, reason, now_s)

    def _writer_stopped(self, record: GrantRecord, event: Any, now_s: float, _: RefusalReason) -> None:
        exited = isinstance(event, ev.WriterExited)
        reason = record.reason or (RefusalReason.WRITER_EXITED if exited else RefusalReason.WRITER_STOPPED)
        self._end(record, reason, now_s)

    def _still_draining(self, record: GrantRecord, event: ev.WriterDraining, now_s: float, _: RefusalReason) -> None:
        """As long as it gets further it is waited for. That nothing is left is a fence only as its own call."""
        if event.num_bytes > 0 and (record.left_bytes is None or event.num_bytes < record.left_bytes):
            record.left_bytes, record.drained_s = event.num_bytes, now_s

    def _drained_by_closing(self, record: GrantRecord, _: Any, now_s: float, __: RefusalReason) -> None:
        record.left_bytes, record.drained_s = 0, now_s

    def _ignore(self, record: GrantRecord, event: Any, now_s: float, reason: RefusalReason) -> None:
        """A late or repeated message that changes nothing."""


def _describe(mismatches: tuple[tuple[int, int], ...]) -> str:
    some = ", ".join(f"layer {layer} page {page}" for layer, page in mismatches[:4])
    return f"{len(mismatches)} extents differ from what was sealed: {some}"


_Handler = Callable[[ReceiverHandoffs, GrantRecord, Any, float, RefusalReason], None]


def _table() -> dict[tuple[GrantState, type], _Handler]:
    R, S = ReceiverHandoffs, GrantState
    W, G, O, V, A, Q, D, F = (  # noqa: E741 - one letter a state keeps the table on one screen
        S.WAITING, S.GRANTED, S.OPEN, S.VERIFYING, S.ABANDONED, S.QUARANTINED, S.ADMITTED, S.REFUSED,
    )  # fmt: skip
    rows: dict[type, dict[_Handler, tuple[GrantState, ...]]] = {
        ev.ReserveReceived: {R._ignore: (W,), R._repeat_grant: (G, O, V, D), R._repeat_refusal: (A, Q, F)},
        ev.ReservationGranted: {R._grant: (W,), R._grant_too_late: (F,)},
        ev.ReservationDenied: {R._deny: (W,), R._ignore: (F,)},
        ev.GrantGivenOut: {
            R._attach: (G,), R._attach_again: (O,), R._repeat_refusal: (A, Q, F), R._refuse_ended: (V, D),
        },
        ev.LeaseRenewed: {R._renew: (G, O), R._repeat_refusal: (A, Q, F), R._refuse_ended: (V, D)},
        ev.PartReceived: {
            R._part: (O,), R._part_unattached: (G,), R._ignore: (V, D), R._repeat_refusal: (A, Q, F),
        },
        ev.PartVerified: {R._part_verified: (O,), R._ignore: (V, D), R._repeat_refusal: (A, Q, F)},
        ev.CommitReceived: {
            R._commit: (O,), R._commit_refused: (G, Q),
            R._ignore: (V,), R._repeat_ack: (D,), R._repeat_refusal: (A, F),
        },
        ev.DigestsVerified: {R._verified: (V,), R._verified_for_nobody: (A,)},
        ev.RequestCancelled: {
            R._cancel_queued: (W,), R._cancel_private: (G,), R._cancel_open: (O,), R._abandon: (V,),
            R._ignore: (A, Q, D, F),
        },
        ev.WriterConfirmedIdle: {R._writer_stopped: (G, O, Q), R._ignore: (V, A, D, F)},
        ev.WriterDraining: {R._still_draining: (Q,), R._ignore: (G, O, V, A, D, F)},
        ev.LinkClosed: {R._drained_by_closing: (Q,), R._ignore: (O, V, A, D, F)},
        ev.WriterExited: {R._writer_stopped: (O, Q), R._ignore: (V, A, D, F)},
    }  # fmt: skip
    return {(s, event): handler for event, cells in rows.items() for handler, states in cells.items() for s in states}


# All and only the legal pairs of state and event. `Tick` is handled by `_pass_time`.
TRANSITIONS = _table()
