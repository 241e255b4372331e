"""The receiver's table: every state meets every event; then the guards and the times."""

from __future__ import annotations

from dataclasses import replace

import pytest
from handoff_examples import KEY, LAYOUT, PAGES, RECEIVER, SENDER, commit_for, names
from handoff_workers import MISMATCH, ReceivingWorker
from handoff_workers import RECEIVER_LIMITS as LIMITS

from kvtransfer.protocol import receiver as receiver_module
from kvtransfer.protocol import receiver_events as ev
from kvtransfer.protocol.grants import GrantRecord, GrantState, ReceiverLimits
from kvtransfer.protocol.messages import AttemptKey, RefusalReason
from kvtransfer.protocol.receiver import TRANSITIONS
from tandem.core.errors import IllegalTransitionError

STOP = "QuarantinePages AskWriterToStop"
LIFT = "EndWrites LiftQuarantine"
NO = "SendRefusal"
# state: event: (state after, instructions). `!` is illegal: only this worker's own defect could cause it.
EXPECTED: dict[str, dict[str, tuple[str, str]]] = {
    "granted": {
        "reserve": ("granted", "SendGrant"),
        "pages": ("!", ""),
        "denied": ("!", ""),
        "attach": ("open", "ExpectWrites ConfirmAttached"),
        "attach-other": ("open", "ExpectWrites ConfirmAttached"),
        "renew": ("granted", "ConfirmRenewed"),
        "part": ("quarantined", f"ExpectWrites {STOP} {NO}"),
        "part-right": ("!", ""),
        "part-wrong": ("!", ""),
        "commit": ("refused", f"FreePages {NO}"),
        "right": ("!", ""),
        "wrong": ("!", ""),
        "cancel": ("refused", "FreePages"),
        "idle": ("refused", "FreePages"),
        "draining": ("granted", ""),
        "link-closed": ("granted", ""),
        "exit": ("granted", ""),
    },
    "open": {
        "reserve": ("open", "SendGrant"),
        "pages": ("!", ""),
        "denied": ("!", ""),
        "attach": ("open", "ConfirmAttached"),
        "attach-other": ("open", NO),
        "renew": ("open", "ConfirmRenewed"),
        "part": ("open", "VerifyPart"),
        "part-right": ("open", "ConfirmPart"),
        "part-wrong": ("quarantined", f"{STOP} {NO}"),
        "commit": ("verifying", "EndWrites VerifyDigests"),
        "right": ("!", ""),
        "wrong": ("!", ""),
        "cancel": ("quarantined", STOP),
        "idle": ("refused", "EndWrites FreePages"),
        "draining": ("open", ""),
        "link-closed": ("open", ""),
        "exit": ("refused", "EndWrites FreePages"),
    },
    "verifying": {
        "reserve": ("verifying", "SendGrant"),
        "pages": ("!", ""),
        "denied": ("!", ""),
        "attach": ("verifying", NO),
        "attach-other": ("verifying", NO),
        "renew": ("verifying", NO),
        "part": ("verifying", ""),
        "part-right": ("verifying", ""),
        "part-wrong": ("verifying", ""),
        "commit": ("verifying", ""),
        "right": ("admitted", "AdmitRequest SendAck"),
        "wrong": ("refused", f"FreePages {NO}"),
        "cancel": ("abandoned", NO),
        "idle": ("verifying", ""),
        "draining": ("verifying", ""),
        "link-closed": ("verifying", ""),
        "exit": ("verifying", ""),
    },
    "abandoned": {
        "reserve": ("abandoned", NO),
        "pages": ("!", ""),
        "denied": ("!", ""),
        "attach": ("abandoned", NO),
        "attach-other": ("abandoned", NO),
        "renew": ("abandoned", NO),
        "part": ("abandoned", NO),
        "part-right": ("abandoned", NO),
        "part-wrong": ("abandoned", NO),
        "commit": ("abandoned", NO),
        "right": ("refused", "FreePages"),
        "wrong": ("refused", "FreePages"),
        "cancel": ("abandoned", ""),
        "idle": ("abandoned", ""),
        "draining": ("abandoned", ""),
        "link-closed": ("abandoned", ""),
        "exit": ("abandoned", ""),
    },
    "quarantined": {
        "reserve": ("quarantined", NO),
        "pages": ("!", ""),
        "denied": ("!", ""),
        "attach": ("quarantined", NO),
        "attach-other": ("quarantined", NO),
        "renew": ("quarantined", NO),
        "part": ("quarantined", NO),
        "part-right": ("quarantined", NO),
        "part-wrong": ("quarantined", NO),
        "commit": ("refused", f"{LIFT} {NO}"),
        "right": ("!", ""),
        "wrong": ("!", ""),
        "cancel": ("quarantined", ""),
        "idle": ("refused", LIFT),
        "draining": ("quarantined", ""),
        "link-closed": ("quarantined", ""),
        "exit": ("refused", LIFT),
    },
    "admitted": {
        "reserve": ("admitted", "SendGrant"),
        "pages": ("!", ""),
        "denied": ("!", ""),
        "attach": ("admitted", NO),
        "attach-other": ("admitted", NO),
        "renew": ("admitted", NO),
        "part": ("admitted", ""),
        "part-right": ("admitted", ""),
        "part-wrong": ("admitted", ""),
        "commit": ("admitted", "SendAck"),
        "right": ("!", ""),
        "wrong": ("!", ""),
        "cancel": ("admitted", ""),
        "idle": ("admitted", ""),
        "draining": ("admitted", ""),
        "link-closed": ("admitted", ""),
        "exit": ("admitted", ""),
    },
    "refused": {
        "reserve": ("refused", NO),
        "pages": ("refused", "FreePages"),
        "denied": ("refused", ""),
        "attach": ("refused", NO),
        "attach-other": ("refused", NO),
        "renew": ("refused", NO),
        "part": ("refused", NO),
        "part-right": ("refused", NO),
        "part-wrong": ("refused", NO),
        "commit": ("refused", NO),
        "right": ("!", ""),
        "wrong": ("!", ""),
        "cancel": ("refused", ""),
        "idle": ("refused", ""),
        "draining": ("refused", ""),
        "link-closed": ("refused", ""),
        "exit": ("refused", ""),
    },
}
CELLS = [(s, e, *expected) for s, row in EXPECTED.items() for e, expected in row.items()]


@pytest.mark.parametrize(("state", "event", "after", "told"), CELLS)
def test_every_state_meets_every_event(state: str, event: str, after: str, told: str) -> None:
    worker = ReceivingWorker().reach(state)
    if after == "!":
        with pytest.raises(IllegalTransitionError, match="history: waiting"):
            worker.feed(worker.event(event))
        assert worker.state.value == state
        return
    assert " ".join(names(worker.feed(worker.event(event)))) == told
    assert worker.state.value == after


# What only moves an attempt forward once: a repetition must not undo, admit again or free again.
ONCE = {"FreePages", "LiftQuarantine", "AdmitRequest", "QuarantinePages", "ExpectWrites", "EndWrites"}


# Late pages are handed over anew each time, so they are no repetition.
REPEATABLE = [c[:2] for c in CELLS if c[2] != "!" and c[:2] != ("refused", "pages")]


@pytest.mark.parametrize(("state", "event"), REPEATABLE)
def test_a_repeated_message_gets_the_same_answer_and_moves_no_page(state: str, event: str) -> None:
    worker = ReceivingWorker().reach(state)
    message = worker.event(event)
    first = worker.feed(message)
    if event in ("right", "wrong"):
        with pytest.raises(IllegalTransitionError):
            worker.feed(message)
        return
    again = worker.feed(message)
    assert not ONCE & set(names(again))
    refusals = [[i for i in out if isinstance(i, ev.SendRefusal)] for out in (first, again)]
    if refusals[0] and event != "cancel":  # a cancel is not what its refusal answers: that is the commit
        assert refusals[1]
        assert refusals[1][0].reason is refusals[0][0].reason


def test_the_table_and_this_walk_cover_each_other() -> None:
    kinds = {
        "reserve": ev.ReserveReceived, "pages": ev.ReservationGranted, "denied": ev.ReservationDenied,
        "attach": ev.GrantGivenOut, "renew": ev.LeaseRenewed, "part": ev.PartReceived,
        "part-right": ev.PartVerified, "commit": ev.CommitReceived,
        "right": ev.DigestsVerified, "cancel": ev.RequestCancelled, "idle": ev.WriterConfirmedIdle,
        "draining": ev.WriterDraining, "link-closed": ev.LinkClosed, "exit": ev.WriterExited,
    }  # fmt: skip
    for state, row in EXPECTED.items():
        for name, kind in kinds.items():
            unreachable = state == "granted" and name in ("link-closed", "exit")  # no writer is known there
            legal = row[name][0] != "!" and not unreachable
            assert ((GrantState(state), kind) in TRANSITIONS) == legal, (state, name)


# ---- waiting for pages


def test_a_reservation_waits_is_granted_and_is_repeated_by_key() -> None:
    worker = ReceivingWorker()
    assert worker.feed(ev.ReserveReceived(KEY)) == [ev.QueueReservation(KEY)]
    assert worker.feed(ev.ReserveReceived(KEY)) == []
    (sent,) = worker.feed(ev.ReservationGranted(KEY, PAGES, first_page=2))
    assert isinstance(sent, ev.SendGrant)
    assert (sent.grant.pages, sent.grant.first_page, sent.grant.receiver) == (PAGES, 2, RECEIVER)
    assert worker.feed(ev.ReserveReceived(KEY)) == [sent]


def test_a_denied_reservation_is_refused_for_good() -> None:
    worker = ReceivingWorker().reach("waiting")
    (refusal,) = worker.feed(ev.ReservationDenied(KEY, RefusalReason.NO_ROOM))
    assert worker.feed(ev.ReserveReceived(KEY)) == [refusal]
    assert isinstance(refusal, ev.SendRefusal)
    assert refusal.reason is RefusalReason.NO_ROOM


def test_a_cancel_while_waiting_gives_late_pages_straight_back() -> None:
    worker = ReceivingWorker().reach("waiting")
    assert names(worker.feed(ev.RequestCancelled(KEY))) == ["DropReservation", "SendRefusal"]
    assert worker.feed(ev.ReservationGranted(KEY, PAGES)) == [ev.FreePages(KEY, None, PAGES)]


def test_a_cancel_that_overtakes_its_reserve_still_wins() -> None:
    worker = ReceivingWorker()
    assert worker.feed(ev.RequestCancelled(KEY)) == []
    (refusal,) = worker.feed(ev.ReserveReceived(KEY))
    assert isinstance(refusal, ev.SendRefusal)
    assert refusal.reason is RefusalReason.CANCELLED


def test_a_newer_attempt_ends_older_ones_and_older_ones_come_too_late() -> None:
    worker = ReceivingWorker().reach("open")
    out = worker.feed(ev.ReserveReceived(AttemptKey("request", 3)))
    assert names(out) == ["QuarantinePages", "AskWriterToStop", "QueueReservation"]
    (refusal,) = worker.feed(ev.ReserveReceived(AttemptKey("request", 2)))
    assert isinstance(refusal, ev.SendRefusal)
    assert refusal.reason is RefusalReason.STALE_ATTEMPT
    assert worker.feed(ev.ReserveReceived(AttemptKey("other", 1))) == [ev.QueueReservation(AttemptKey("other", 1))]


def test_each_grant_has_an_epoch_of_its_own() -> None:
    worker = ReceivingWorker().reach("granted")
    other = AttemptKey("other", 1)
    worker.feed(ev.ReserveReceived(other))
    (sent,) = worker.feed(ev.ReservationGranted(other, (9,)))
    assert isinstance(sent, ev.SendGrant)
    assert sent.grant.epoch > worker.grant.epoch
    assert sent.grant.grant_id != worker.grant.grant_id


# ---- what a commit must say

WRONG = {
    RefusalReason.WRONG_RECEIVER: {"receiver": "decode-0#0"},
    RefusalReason.UNKNOWN_GRANT: {"grant_id": "decode-0#1/99"},
    RefusalReason.WRONG_ATTEMPT: {"key": AttemptKey("request", 2)},
    RefusalReason.WRONG_EPOCH: {"epoch": 99},
    RefusalReason.WRONG_SENDER: {"sender": "prefill-9#1"},
}
BAD = {
    RefusalReason.LAYOUT_MISMATCH: {"layout": replace(LAYOUT, dtype="bfloat16")},
    RefusalReason.OUTSIDE_GRANT: {"pages": (*PAGES[:-1], 99)},
    RefusalReason.INCOMPLETE: {"pages": PAGES[:-1]},
}


@pytest.mark.parametrize("reason", WRONG)
def test_a_commit_that_is_not_about_this_grant_changes_nothing(reason: RefusalReason) -> None:
    worker = ReceivingWorker().reach("open")
    (refusal,) = worker.feed(ev.CommitReceived(commit_for(worker.grant, **WRONG[reason])))
    assert isinstance(refusal, ev.SendRefusal)
    assert refusal.reason is reason
    assert worker.state is GrantState.OPEN


@pytest.mark.parametrize("reason", BAD)
def test_a_commit_with_wrong_contents_is_refused_and_still_a_fence(reason: RefusalReason) -> None:
    worker = ReceivingWorker().reach("open")
    out = worker.feed(ev.CommitReceived(commit_for(worker.grant, **BAD[reason])))
    assert names(out) == ["EndWrites", "FreePages", "SendRefusal"]
    assert isinstance(out[-1], ev.SendRefusal)
    assert out[-1].reason is reason


@pytest.mark.parametrize("digests", [((1, 2, 3),), ((1, 2, 3), (1, 2)), ((), ())])
def test_a_commit_must_have_every_extent(digests: tuple[tuple[int, ...], ...]) -> None:
    worker = ReceivingWorker().reach("open")
    out = worker.feed(ev.CommitReceived(commit_for(worker.grant, digests=digests)))
    assert isinstance(out[-1], ev.SendRefusal)
    assert out[-1].reason is RefusalReason.INCOMPLETE


def test_pages_must_come_in_the_order_of_the_grant() -> None:
    worker = ReceivingWorker().reach("open")
    out = worker.feed(ev.CommitReceived(commit_for(worker.grant, pages=PAGES[::-1])))
    assert isinstance(out[-1], ev.SendRefusal)
    assert out[-1].reason is RefusalReason.INCOMPLETE


def test_a_refused_digest_names_the_extents() -> None:
    worker = ReceivingWorker().reach("verifying")
    out = worker.feed(ev.DigestsVerified(worker.grant.grant_id, MISMATCH))
    assert isinstance(out[-1], ev.SendRefusal)
    assert out[-1].reason is RefusalReason.DIGEST_MISMATCH
    assert "layer 0 page 3" in out[-1].detail


def test_nothing_wrong_is_admitted_and_this_test_can_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiver_module, "find_problem", lambda commit, grant: None)
    worker = ReceivingWorker().reach("open")
    assert "VerifyDigests" in names(worker.feed(ev.CommitReceived(commit_for(worker.grant, pages=PAGES[:-1]))))


# ---- who writes


def test_a_writer_that_comes_too_late_is_refused_and_is_not_the_writer() -> None:
    worker = ReceivingWorker().reach("quarantined")
    other = worker.event("attach-other")
    assert names(worker.feed(other)) == [NO]
    assert worker.feed(ev.WriterExited("prefill-9#1")) == []
    assert worker.state is GrantState.QUARANTINED


def test_a_cancel_leaves_the_writer_its_lease_to_drain_in() -> None:
    worker = ReceivingWorker().reach("open")
    worker.feed(ev.RequestCancelled(KEY))
    worker.now_s += LIMITS.grace_s
    assert "KillWriter" not in names(worker.feed(ev.Tick()))
    worker.now_s += LIMITS.lease_s
    assert "KillWriter" in names(worker.feed(ev.Tick()))


def test_a_writer_that_has_closed_its_connection_gets_a_lease_for_what_it_has_to_say_and_not_for_ever() -> None:
    worker = ReceivingWorker().reach("quarantined")
    begun_s = worker.now_s
    for _ in range(20):
        worker.now_s += LIMITS.lease_s / 2
        worker.feed(ev.LinkClosed(SENDER))
        if "KillWriter" in names(worker.feed(ev.Tick())):
            break
        assert "KillWriter" not in names(worker.feed(ev.LinkClosed("prefill-9#1")))
    assert worker.now_s >= begun_s + LIMITS.longest_drain_s + LIMITS.grace_s
    assert worker.now_s < begun_s + LIMITS.longest_drain_s + LIMITS.grace_s + LIMITS.lease_s


def test_one_exit_fences_all_grants_of_that_writer_only() -> None:
    worker = ReceivingWorker().reach("open")
    other = AttemptKey("other", 1)
    worker.feed(ev.ReserveReceived(other), ev.ReservationGranted(other, (9,)))
    worker.feed(ev.GrantGivenOut(f"{RECEIVER}/2", "prefill-9#1", worker.grant_of(other).capability))
    assert worker.feed(ev.WriterExited(SENDER))[-1] == ev.FreePages(KEY, f"{RECEIVER}/1", PAGES)
    assert worker.handoffs.record(other).state is GrantState.OPEN  # type: ignore[union-attr]


def test_messages_about_unknown_grants_are_answered() -> None:
    worker = ReceivingWorker()
    refusal = ev.SendRefusal(None, "x", RefusalReason.UNKNOWN_GRANT)
    assert worker.feed(ev.GrantGivenOut("x", SENDER, b"")) == [refusal]
    assert worker.feed(ev.LeaseRenewed("x", SENDER, b"")) == [refusal]
    assert worker.feed(ev.WriterConfirmedIdle("x", SENDER, b"")) == []
    with pytest.raises(IllegalTransitionError):
        worker.feed(ev.DigestsVerified("x"))


# ---- time


def test_a_grant_that_nobody_took_is_freed_when_its_lease_ends() -> None:
    worker = ReceivingWorker().reach("granted")
    assert worker.handoffs.next_deadline_s() == worker.now_s + LIMITS.lease_s
    worker.now_s += LIMITS.lease_s - 0.01
    assert worker.feed(ev.Tick()) == []
    worker.now_s += 0.01
    assert names(worker.feed(ev.Tick())) == ["FreePages"]


def test_a_lost_lease_quarantines_asks_again_and_at_last_kills() -> None:
    worker = ReceivingWorker().reach("open")
    worker.now_s += LIMITS.lease_s
    out = worker.feed(ev.Tick())
    assert names(out) == ["QuarantinePages", "AskWriterToStop"]
    assert worker.handoffs.num_quarantined_pages == len(PAGES)
    kills = asks = 0
    for _ in range(11):
        worker.now_s += LIMITS.ask_again_s
        told = names(worker.feed(ev.Tick()))
        kills += told.count("KillWriter")
        asks += told.count("AskWriterToStop")
        assert "LiftQuarantine" not in told
    assert (asks, kills) == (11, 2)  # a kill may get lost: once each grace
    assert names(worker.feed(ev.WriterExited(SENDER))) == ["EndWrites", "LiftQuarantine"]
    assert worker.handoffs.num_quarantined_pages == 0


def test_attaching_and_renewing_start_the_lease_anew() -> None:
    worker = ReceivingWorker().reach("granted")
    for event in ("attach", "attach", "renew"):
        worker.now_s += LIMITS.lease_s - 1
        worker.feed(worker.event(event))
        assert worker.handoffs.next_deadline_s() == worker.now_s + LIMITS.lease_s


def test_those_who_wait_for_pages_cost_the_others_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = ReceivingWorker().reach("open")
    for number in range(500):
        worker.feed(ev.ReserveReceived(AttemptKey(f"waits-{number}", 1)))
    asked: list[AttemptKey] = []
    deadline_s = GrantRecord.deadline_s

    def counted(record: GrantRecord, limits: ReceiverLimits) -> float | None:
        asked.append(record.key)
        return deadline_s(record, limits)

    monkeypatch.setattr(GrantRecord, "deadline_s", counted)
    assert worker.handoffs.next_deadline_s() == worker.now_s + LIMITS.lease_s
    worker.feed(ev.Tick())
    assert set(asked) == {KEY}
    waiting = worker.handoffs.record(AttemptKey("waits-0", 1))
    assert waiting is not None
    worker.feed(ev.RequestCancelled(waiting.key))
    worker.now_s += LIMITS.remember_s
    worker.feed(worker.event("renew"), ev.Tick())
    assert worker.handoffs.record(waiting.key) is None, "an end is forgotten in time"


def test_a_commit_in_time_is_not_overtaken_by_its_lease() -> None:
    worker = ReceivingWorker().reach("verifying")
    assert worker.handoffs.next_deadline_s() is None
    worker.now_s += 10 * LIMITS.lease_s
    assert worker.feed(ev.Tick()) == []


@pytest.mark.parametrize("state", ["admitted", "refused"])
def test_answers_are_forgotten_in_the_end(state: str) -> None:
    worker = ReceivingWorker().reach(state)
    commit = commit_for(worker.grant)
    worker.now_s += LIMITS.remember_s
    worker.feed(ev.Tick())
    assert worker.handoffs.records() == []
    assert worker.handoffs.next_deadline_s() is None
    (refusal,) = worker.feed(ev.CommitReceived(commit))
    assert isinstance(refusal, ev.SendRefusal)
    assert refusal.reason is RefusalReason.UNKNOWN_GRANT


def test_pages_that_stay_in_quarantine_above_the_cap_replace_the_worker_once() -> None:
    worker = ReceivingWorker(replace(LIMITS, quarantine_cap_pages=2)).reach("open")
    assert names(worker.feed(ev.RequestCancelled(KEY))) == ["QuarantinePages", "AskWriterToStop"]
    worker.now_s += LIMITS.grace_s - 0.01
    assert "ReplaceSelf" not in names(worker.feed(ev.Tick()))
    worker.now_s += 0.01
    assert "ReplaceSelf" in names(worker.feed(ev.Tick()))
    worker.now_s += LIMITS.grace_s
    assert "ReplaceSelf" not in names(worker.feed(ev.Tick()))


def test_a_writer_that_confirms_in_time_costs_no_worker() -> None:
    worker = ReceivingWorker(replace(LIMITS, quarantine_cap_pages=2)).reach("open")
    worker.feed(ev.RequestCancelled(KEY))
    grant = worker.grant_of(KEY)
    worker.feed(ev.WriterConfirmedIdle(grant.grant_id, SENDER, grant.capability))
    worker.now_s += 2 * LIMITS.grace_s
    assert "ReplaceSelf" not in names(worker.feed(ev.Tick()))


def test_a_denial_that_comes_after_the_record_is_forgotten_changes_nothing() -> None:
    worker = ReceivingWorker().reach("refused")
    worker.now_s += LIMITS.remember_s
    worker.feed(ev.Tick())
    assert worker.handoffs.record(KEY) is None
    assert worker.feed(ev.ReservationDenied(KEY, RefusalReason.ALREADY_ENDED)) == []


class Counted(GrantRecord):
    """Counts how often time is looked up in it."""

    num_looks = 0

    def deadline_s(self, limits: ReceiverLimits) -> float | None:
        Counted.num_looks += 1
        return super().deadline_s(limits)


def test_what_has_ended_costs_no_time_at_each_event(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtransfer.protocol.grant_book.GrantRecord", Counted)
    worker = ReceivingWorker()
    for number in range(50):
        worker.feed(ev.RequestCancelled(AttemptKey(f"ended-{number}", 1)))
        worker.now_s += 0.125
    worker.feed(ev.ReserveReceived(KEY))
    Counted.num_looks = 0
    first_ended_s = worker.now_s - 6.25
    assert worker.handoffs.next_deadline_s() == pytest.approx(first_ended_s + LIMITS.remember_s)
    worker.feed(ev.Tick())
    assert Counted.num_looks <= 4, "the one that waits, and the oldest of the others"
    worker.now_s = first_ended_s + LIMITS.remember_s + 1.0
    worker.feed(ev.Tick())
    assert len(worker.handoffs.records()) == 51 - 9, "forgotten in the order in which they ended"
