"""The receiver's half of the handoff: who may write which pages, and when they are free again.

    WAITING ──> GRANTED ──> OPEN ──> VERIFYING ──> ADMITTED
                   │          │          ├───────> REFUSED        digests differ
                   │          │          └─> ABANDONED ──> REFUSED   cancelled while its pages are read
                   │          └─> QUARANTINED ──fence──> REFUSED
                   └─────────────────────────────> REFUSED        nobody ever knew of the pages

Pages leave a grant by exactly one of `AdmitRequest`, `FreePages` and `QuarantinePages` → `LiftQuarantine`. From OPEN
on, they are freed only behind a fence: the writer's own word that nothing is outstanding (a commit says so too), or
its exit. A lost lease, a cancel or a missed heartbeat is none.

Pure: no I/O, no clock; `handle(event, now_s)` returns instructions. Not thread-safe.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvtransfer.layout import LayoutId
from kvtransfer.protocol import receiver_events as ev
from kvtransfer.protocol.grants import GrantRecord, GrantState, ReceiverLimits, find_contradiction, find_problem
from kvtransfer.protocol.messages import AttemptKey, Commit, Grant, RefusalReason
from tandem.core.errors import IllegalTransitionError


class ReceiverHandoffs:
    """All grants of one decode worker, keyed by attempt.

    Args:
        incarnation: this worker's life; prefix of its grant ids.
        layout: of this worker's arena.
    """

    def __init__(self, incarnation: str, layout: LayoutId, limits: ReceiverLimits | None = None) -> None:
        self.incarnation = incarnation
        self.layout = layout
        self.limits = limits or ReceiverLimits()
        self._records: dict[AttemptKey, GrantRecord] = {}
        # Invariant: holds all and only records that have a grant, by its id.
        self._by_grant: dict[str, GrantRecord] = {}
        # Invariant: per request the attempts in _records, ascending.
        self._attempts: dict[str, list[int]] = {}
        self._epoch = 0
        self._kill_asked_s: dict[str, float] = {}
        # Invariant: the pages of all and only records in QUARANTINED.
        self.num_quarantined_pages = 0
        self._replacement_asked = False
        self._out: list[ev.ReceiverInstruction] = []

    # ---- looking

    def record(self, key: AttemptKey) -> GrantRecord | None:
        """The record of an attempt; `None` when it was never seen or is forgotten."""
        return self._records.get(key)

    def records(self) -> list[GrantRecord]:
        return list(self._records.values())

    def next_deadline_s(self) -> float | None:
        """When the next `Tick` is due; `None` while time alone changes nothing."""
        deadlines_s = (r.deadline_s(self.limits) for r in self._records.values())
        return min((d for d in deadlines_s if d is not None), default=None)

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
                for record in list(self._records.values()):
                    self._pass_time(record, now_s)
            case ev.WriterExited():
                self._kill_asked_s.pop(event.sender, None)
                for record in [r for r in self._records.values() if r.sender == event.sender]:
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
        self._check_quarantine()
        return self._out

    # ---- finding the record

    def _find(self, event: Any) -> GrantRecord | None:
        if isinstance(event, ev.CommitReceived):
            return self._find_for_commit(event.commit)
        if hasattr(event, "grant_id"):
            found = self._by_grant.get(event.grant_id)
            if found is None and isinstance(event, ev.GrantGivenOut | ev.LeaseRenewed):
                self._out.append(ev.SendRefusal(None, event.grant_id, RefusalReason.UNKNOWN_GRANT))
                return None
            if found is None and isinstance(event, ev.WriterConfirmedIdle):
                return None  # late or repeated: the grant is forgotten, so its pages were freed
        else:
            found = self._records.get(event.key)
        if found is None:
            raise IllegalTransitionError(f"{event} concerns no attempt known to {self.incarnation}")
        return found

    def _find_for_commit(self, commit: Commit) -> GrantRecord | None:
        """The record a commit speaks about; a commit that contradicts it is refused and changes nothing."""
        record = self._by_grant.get(commit.grant_id)
        reason = find_contradiction(commit, record, self.incarnation)
        if reason is None:
            return record
        self._out.append(ev.SendRefusal(commit.key, commit.grant_id, reason))
        return None

    # ---- records

    def _new_record(self, key: AttemptKey, now_s: float) -> GrantRecord:
        record = self._records[key] = GrantRecord(key, now_s)
        attempts = self._attempts.setdefault(key.request_id, [])
        attempts.append(key.attempt)
        attempts.sort()
        return record

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

    def _forget(self, record: GrantRecord) -> None:
        del self._records[record.key]
        if record.grant is not None:
            del self._by_grant[record.grant.grant_id]
        attempts = self._attempts[record.key.request_id]
        attempts.remove(record.key.attempt)
        if not attempts:
            del self._attempts[record.key.request_id]

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

    def _move(
        self, record: GrantRecord, state: GrantState, now_s: float, reason: RefusalReason | None = None
    ) -> None:
        record.history.append(record.state.value)
        record.state = state
        record.since_s = now_s
        record.reason = reason

    def _stop(self, record: GrantRecord, reason: RefusalReason, now_s: float) -> None:
        """End a grant whose writer may still write: only a fence frees its pages."""
        grant = record.held
        self._move(record, GrantState.QUARANTINED, now_s, reason)
        self.num_quarantined_pages += len(grant.pages)
        self._out.append(ev.QuarantinePages(record.key, grant.grant_id, grant.pages))
        self._ask_to_stop(record, now_s)

    def _end(self, record: GrantRecord, reason: RefusalReason, now_s: float) -> None:
        """End a grant whose pages no write can reach: no writer ever knew of it, or a fence was seen."""
        grant, was = record.held, record.state
        self._move(record, GrantState.REFUSED, now_s, reason)
        record.commit = None
        if was in (GrantState.OPEN, GrantState.QUARANTINED):
            self._out.append(ev.EndWrites(grant.grant_id))
        if was is GrantState.QUARANTINED:
            self.num_quarantined_pages -= len(grant.pages)
            self._kill_asked_s.pop(record.sender or "", None)
            self._out.append(ev.LiftQuarantine(record.key, grant.grant_id, grant.pages))
        else:
            self._out.append(ev.FreePages(record.key, grant.grant_id, grant.pages))

    def _refuse(self, record: GrantRecord, detail: str = "") -> None:
        assert record.reason is not None
        grant_id = record.grant.grant_id if record.grant else None
        self._out.append(ev.SendRefusal(record.key, grant_id, record.reason, detail))

    def _ask_to_stop(self, record: GrantRecord, now_s: float) -> None:
        assert record.reason is not None
        record.asked_s = now_s
        self._out.append(ev.AskWriterToStop(record.held.grant_id, record.key, record.sender, record.reason))

    # ---- time

    def _pass_time(self, record: GrantRecord, now_s: float) -> None:
        deadline_s = record.deadline_s(self.limits)
        if deadline_s is None or now_s < deadline_s:
            return
        match record.state:
            case GrantState.GRANTED:
                self._end(record, RefusalReason.LEASE_EXPIRED, now_s)
            case GrantState.OPEN:
                self._stop(record, RefusalReason.LEASE_EXPIRED, now_s)
            case GrantState.QUARANTINED:
                self._ask_to_stop(record, now_s)
                self._kill_if_silent(record, now_s)
            case _:
                self._forget(record)

    def _kill_if_silent(self, record: GrantRecord, now_s: float) -> None:
        # Beyond lease *and* grace: a writer that drains after a cancel may take as long as its lease allowed.
        silent_from_s = max(record.since_s, record.lease_ends_s)
        if record.sender is None or now_s < silent_from_s + self.limits.grace_s:
            return
        asked_s = self._kill_asked_s.get(record.sender)
        if asked_s is None or now_s >= asked_s + self.limits.grace_s:
            self._kill_asked_s[record.sender] = now_s
            self._out.append(ev.KillWriter(record.sender))

    def _check_quarantine(self) -> None:
        over = self.num_quarantined_pages > self.limits.quarantine_cap_pages
        if over and not self._replacement_asked:
            self._out.append(ev.ReplaceSelf(self.num_quarantined_pages))
        self._replacement_asked = over

    # ---- what each event does, by state (see TRANSITIONS)

    def _grant(self, record: GrantRecord, event: ev.ReservationGranted, now_s: float, _: RefusalReason) -> None:
        self._epoch += 1
        record.grant = Grant(
            grant_id=f"{self.incarnation}/{self._epoch}",
            key=record.key,
            epoch=self._epoch,
            receiver=self.incarnation,
            layout=self.layout,
            pages=event.pages,
            lease_s=self.limits.lease_s,
            first_page=event.first_page,
        )
        self._by_grant[record.grant.grant_id] = record
        record.lease_ends_s = now_s + self.limits.lease_s
        self._move(record, GrantState.GRANTED, now_s)
        self._out.append(ev.SendGrant(record.grant))

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
        if record.sender is None:
            record.sender = event.sender
        elif event.sender not in (None, record.sender):
            grant_id = record.held.grant_id
            self._out.append(ev.SendRefusal(record.key, grant_id, RefusalReason.WRONG_SENDER))
            return
        record.lease_ends_s = now_s + self.limits.lease_s
        self._out.append(ev.ConfirmAttached(record.held, record.sender))

    def _attach_too_late(self, record: GrantRecord, event: ev.GrantGivenOut, _: float, __: RefusalReason) -> None:
        # Who might write is worth knowing even now: it is who can be asked, and killed.
        record.sender = record.sender or event.sender
        self._refuse(record)

    def _refuse_ended(self, record: GrantRecord, _: Any, __: float, ___: RefusalReason) -> None:
        self._out.append(ev.SendRefusal(record.key, record.held.grant_id, RefusalReason.ALREADY_ENDED))

    def _renew(self, record: GrantRecord, _: Any, now_s: float, __: RefusalReason) -> None:
        record.lease_ends_s = now_s + self.limits.lease_s
        self._out.append(ev.ConfirmRenewed(record.held.grant_id, self.limits.lease_s))

    def _commit(self, record: GrantRecord, event: ev.CommitReceived, now_s: float, _: RefusalReason) -> None:
        grant, commit = record.held, event.commit
        problem = find_problem(commit, grant)
        if problem is not None:
            reason, detail = problem
            self._end(record, reason, now_s)
            self._refuse(record, detail)
            return
        record.sender = commit.sender
        record.commit = commit
        self._move(record, GrantState.VERIFYING, now_s)
        self._out.append(ev.EndWrites(grant.grant_id))
        self._out.append(ev.VerifyDigests(grant.grant_id, grant.pages, commit.digests))

    def _commit_refused(self, record: GrantRecord, _: Any, now_s: float, __: RefusalReason) -> None:
        """Too late, or without an attach; but a fence: every write has completed and none will follow."""
        self._end(record, record.reason or RefusalReason.NOT_ATTACHED, now_s)
        self._refuse(record)

    def _verified(self, record: GrantRecord, event: ev.DigestsVerified, now_s: float, _: RefusalReason) -> None:
        grant, commit = record.held, record.commit
        assert commit is not None
        if event.mismatches:
            self._end(record, RefusalReason.DIGEST_MISMATCH, now_s)
            some = ", ".join(f"layer {layer} page {page}" for layer, page in event.mismatches[:4])
            self._refuse(record, f"{len(event.mismatches)} extents differ from what was sealed: {some}")
            return
        self._move(record, GrantState.ADMITTED, now_s)
        record.commit = None
        self._out.append(ev.AdmitRequest(grant, commit))
        self._out.append(ev.SendAck(record.key, grant.grant_id))

    def _verified_for_nobody(self, record: GrantRecord, _: Any, now_s: float, __: RefusalReason) -> None:
        assert record.reason is not None
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

    def _ignore(self, record: GrantRecord, event: Any, now_s: float, reason: RefusalReason) -> None:
        """A late or repeated message that changes nothing."""


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
            R._attach: (G,), R._attach_again: (O,), R._attach_too_late: (A, Q, F), R._refuse_ended: (V, D),
        },
        ev.LeaseRenewed: {R._renew: (G, O), R._repeat_refusal: (A, Q, F), R._refuse_ended: (V, D)},
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
        ev.WriterExited: {R._writer_stopped: (O, Q), R._ignore: (V, A, D, F)},
    }  # fmt: skip
    return {(s, event): handler for event, cells in rows.items() for handler, states in cells.items() for s in states}


# All and only the legal pairs of state and event. `Tick` is handled by `_pass_time`.
TRANSITIONS = _table()
