"""The receiver's records: who finds them, how a grant ends, and what time alone does to it. Pure."""

from __future__ import annotations

from collections import OrderedDict

from kvtransfer.layout import LayoutId
from kvtransfer.protocol import receiver_events as ev
from kvtransfer.protocol.capability import is_capability_of
from kvtransfer.protocol.grants import ENDED, GrantRecord, GrantState, ReceiverLimits, find_contradiction
from kvtransfer.protocol.messages import AttemptKey, Commit, CommitPart, RefusalReason


class GrantBook:
    """All grants of one decode worker, keyed by attempt. What events do to them is `ReceiverHandoffs`'.

    Args:
        incarnation: this worker's life; prefix of its grant ids.
        layout: of this worker's arena.
    """

    def __init__(self, incarnation: str, layout: LayoutId, limits: ReceiverLimits | None = None) -> None:
        self.incarnation = incarnation
        self.layout = layout
        self.limits = limits or ReceiverLimits()
        self._records: dict[AttemptKey, GrantRecord] = {}
        # Invariant: all and only records that were granted and have not ended. What time and the ends of writers do is
        # looked for among these alone: those that wait may be hundreds, the ended ones of the last minute thousands.
        self._live: dict[AttemptKey, GrantRecord] = {}
        # Invariant: all and only those that have, in the order of their ends, so that the first is forgotten first.
        self._ended: OrderedDict[AttemptKey, GrantRecord] = OrderedDict()
        # Invariant: holds all and only records that have a grant, by its id.
        self._by_grant: dict[str, GrantRecord] = {}
        # Invariant: per request the attempts in _records, ascending.
        self._attempts: dict[str, list[int]] = {}
        self._kill_asked_s: dict[str, float] = {}
        # Invariant: the unverified pages of all and only records in QUARANTINED.
        self.num_quarantined_pages = 0
        self._replacement_asked = False
        self._out: list[ev.ReceiverInstruction] = []

    # ---- looking

    def record(self, key: AttemptKey) -> GrantRecord | None:
        """The record of an attempt; `None` when it was never seen or is forgotten."""
        return self._records.get(key)

    def capability_of(self, grant_id: str) -> bytes | None:
        """Of a grant that is known; `None` for others."""
        record = self._by_grant.get(grant_id)
        return record.held.capability if record is not None else None

    def records(self) -> list[GrantRecord]:
        return list(self._records.values())

    def next_deadline_s(self) -> float | None:
        """When the next `Tick` is due; `None` while time alone changes nothing."""
        first_ended = next(iter(self._ended.values()), None)
        records = self._live.values() if first_ended is None else (*self._live.values(), first_ended)
        return min((d for r in records if (d := r.deadline_s(self.limits)) is not None), default=None)

    # ---- finding the record that a sender speaks about; what contradicts it is refused and changes nothing

    def _find_committed(self, said: Commit | CommitPart) -> GrantRecord | None:
        record = self._by_grant.get(said.grant_id)
        reason = find_contradiction(said, record, self.incarnation)
        if reason is None:
            return record
        self._out.append(ev.SendRefusal(said.key, said.grant_id, reason))
        return None

    def _find_written(self, event: ev.GrantGivenOut | ev.LeaseRenewed | ev.WriterConfirmedIdle) -> GrantRecord | None:
        record = self._by_grant.get(event.grant_id)
        if record is None:
            if not isinstance(event, ev.WriterConfirmedIdle):  # else late or repeated: its pages were freed
                self._out.append(ev.SendRefusal(None, event.grant_id, RefusalReason.UNKNOWN_GRANT))
            return None
        if not is_capability_of(record.held, event.capability):
            self._out.append(ev.SendRefusal(record.key, event.grant_id, RefusalReason.BAD_CAPABILITY))
            return None
        if record.sender not in (None, event.sender):
            self._out.append(ev.SendRefusal(record.key, event.grant_id, RefusalReason.WRONG_SENDER))
            return None
        return record

    # ---- records

    def _new_record(self, key: AttemptKey, now_s: float) -> GrantRecord:
        record = self._records[key] = GrantRecord(key, now_s)
        attempts = self._attempts.setdefault(key.request_id, [])
        attempts.append(key.attempt)
        attempts.sort()
        return record

    def _forget(self, record: GrantRecord) -> None:
        del self._records[record.key], self._ended[record.key]
        if record.grant is not None:
            del self._by_grant[record.grant.grant_id]
        attempts = self._attempts[record.key.request_id]
        attempts.remove(record.key.attempt)
        if not attempts:
            del self._attempts[record.key.request_id]

    def _move(self, record: GrantRecord, state: GrantState, now_s: float, reason: RefusalReason | None = None) -> None:
        record.history.append(record.state.value)
        record.state = state
        record.since_s = now_s
        record.reason = reason
        if state in ENDED:
            self._live.pop(record.key, None)
            self._ended[record.key] = record
        else:
            self._live[record.key] = record

    def _refuse(self, record: GrantRecord, detail: str = "") -> None:
        assert record.reason is not None
        grant_id = record.grant.grant_id if record.grant else None
        self._out.append(ev.SendRefusal(record.key, grant_id, record.reason, detail))

    # ---- how a grant ends

    def _stop(self, record: GrantRecord, reason: RefusalReason, now_s: float) -> None:
        """End a grant whose writer may still write: only a fence frees its pages, but for the verified ones."""
        self._move(record, GrantState.QUARANTINED, now_s, reason)
        pages = record.unverified_pages
        self.num_quarantined_pages += len(pages)
        self._out.append(ev.QuarantinePages(record.key, record.held.grant_id, pages, record.verified_pages))
        self._ask_to_stop(record, now_s)

    def _end(self, record: GrantRecord, reason: RefusalReason, now_s: float) -> None:
        """End a grant whose pages no write can reach: no writer ever knew of it, or a fence was seen."""
        grant_id, was = record.held.grant_id, record.state
        pages, verified = record.unverified_pages, record.verified_pages
        self._move(record, GrantState.REFUSED, now_s, reason)
        record.forget_contents()
        if was in (GrantState.OPEN, GrantState.QUARANTINED):
            self._out.append(ev.EndWrites(grant_id))
        if was is GrantState.QUARANTINED:
            self.num_quarantined_pages -= len(pages)
            self._kill_asked_s.pop(record.sender or "", None)
            self._out.append(ev.LiftQuarantine(record.key, grant_id, pages))
        else:
            self._out.append(ev.FreePages(record.key, grant_id, pages, verified))

    def _ask_to_stop(self, record: GrantRecord, now_s: float) -> None:
        assert record.reason is not None
        assert record.sender is not None
        record.asked_s = now_s
        self._out.append(ev.AskWriterToStop(record.held, record.sender, record.reason))

    # ---- time

    def _tick(self, now_s: float) -> None:
        for record in list(self._live.values()):
            self._pass_time(record, now_s)
        while self._ended:
            oldest = next(iter(self._ended.values()))
            if now_s < oldest.since_s + self.limits.remember_s:
                return
            self._forget(oldest)

    def _pass_time(self, record: GrantRecord, now_s: float) -> None:
        """Of a record that has not ended."""
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

    def _kill_if_silent(self, record: GrantRecord, now_s: float) -> None:
        assert record.sender is not None
        # Beyond lease *and* grace: a writer that drains after a cancel may take as long as its lease allowed.
        silent_from_s = max(record.lease_ends_s, record.drains_until_s(self.limits))
        if now_s < silent_from_s + self.limits.grace_s:
            return
        asked_s = self._kill_asked_s.get(record.sender)
        if asked_s is None or now_s >= asked_s + self.limits.grace_s:
            self._kill_asked_s[record.sender] = now_s
            self._out.append(ev.KillWriter(record.sender))

    def _check_quarantine(self, now_s: float) -> None:
        # A cancel in the middle of a write puts pages here for the moment until the writer has answered. Only those
        # that stay say that something is wrong.
        over = self.num_quarantined_pages > self.limits.quarantine_cap_pages and self._num_staying(now_s) > (
            self.limits.quarantine_cap_pages
        )
        if over and not self._replacement_asked:
            self._out.append(ev.ReplaceSelf(self.num_quarantined_pages))
        self._replacement_asked = over

    def _num_staying(self, now_s: float) -> int:
        """Pages whose writer has had the grace time to confirm or to drain further, and has not."""
        before_s = now_s - self.limits.grace_s
        quarantined = (r for r in self._live.values() if r.state is GrantState.QUARANTINED)
        staying = (r for r in quarantined if r.drains_until_s(self.limits) <= before_s)
        return sum(len(record.unverified_pages) for record in staying)
