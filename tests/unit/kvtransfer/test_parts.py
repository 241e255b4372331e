"""Parts of a commit, at both ends: what is told when, what outlives an attempt, and what it must never cost."""

from __future__ import annotations

from collections.abc import ItemsView, Iterator
from typing import Any

import pytest
from handoff_examples import FIRST, KEY, PAGES, SECRET, SENDER, a_grant, commit_for, digest_of, names, part_for
from handoff_workers import LEASE_ENDS_S, LOCAL, RECEIVER_LIMITS, ReceivingWorker, SendingWorker

from kvtransfer.protocol import receiver_events as rx
from kvtransfer.protocol import sender_events as tx
from kvtransfer.protocol.capability import make_capability
from kvtransfer.protocol.grants import ENDED, GrantRecord, GrantState
from kvtransfer.protocol.messages import AttemptKey, CommitPart, RefusalReason

LAST = (PAGES[2],)


def write(worker: SendingWorker, first: int, last: int) -> list[tx.SenderInstruction]:
    """Seal pages `first` to `last - 1` in both layers and let their writes complete; what the last one led to."""
    posts = [worker.seal(layer, first, last)[0] for layer in range(2)]
    out: list[tx.SenderInstruction] = []
    for post in posts:
        assert isinstance(post, tx.PostWrites)
        out = worker.feed(tx.WriteCompleted(post.write_id))
    return out


# ---- the sender


def test_written_pages_are_told_while_others_are_still_computed_each_once() -> None:
    worker = SendingWorker()
    worker.attach()
    assert write(worker, 0, 1) == [tx.SendCommitPart(part_for(a_grant(), 0, 1))]
    assert write(worker, 1, 2) == [tx.SendCommitPart(part_for(a_grant(), 1, 2))]
    assert write(worker, 2, 3) == []
    assert worker.feed(tx.AllComputed(FIRST)) == [tx.SendCommit(commit_for(a_grant()))]


def test_a_page_counts_when_all_its_layers_are_written() -> None:
    worker = SendingWorker()
    worker.attach()
    for layer in range(2):
        worker.seal(layer, 0, 2)
    assert worker.feed(tx.WriteCompleted(1)) == []
    assert worker.feed(tx.WriteCompleted(0)) == [tx.SendCommitPart(part_for(a_grant(), 0, 2))]


def test_a_run_begins_where_the_last_one_ended_and_has_no_gap() -> None:
    worker = SendingWorker()
    worker.attach()
    assert write(worker, 1, 2) == [], "page 0 is missing before it"
    assert write(worker, 0, 1) == [tx.SendCommitPart(part_for(a_grant(), 0, 2))]


def test_pages_that_the_receiver_has_are_not_counted() -> None:
    worker = SendingWorker()
    for layer in range(2):
        worker.seal(layer, 0, 2)
    grant = a_grant(pages=PAGES[1:], first_page=1)
    worker.feed(tx.GrantAttached(grant, LEASE_ENDS_S))
    (told,) = worker.feed(tx.WriteCompleted(0))
    assert told == tx.SendCommitPart(part_for(grant, 0, 1))
    assert isinstance(told, tx.SendCommitPart)
    assert told.part.digests == ((digest_of(0, 1),), (digest_of(1, 1),))


@pytest.mark.parametrize("computed_first", [True, False])
def test_a_prompt_of_one_chunk_has_no_parts(computed_first: bool) -> None:
    worker = SendingWorker()
    worker.attach()
    for layer in range(2):
        worker.seal(layer)
    events: list[tx.SenderEvent] = [tx.WriteCompleted(0), tx.WriteCompleted(1)]
    events.insert(0 if computed_first else 2, tx.AllComputed(FIRST))
    worker.feed(*events)
    assert "SendCommitPart" not in names(worker.told)
    assert "SendCommit" in names(worker.told)


def test_the_last_page_is_never_in_a_part() -> None:
    """Also where an earlier one is sealed after it."""
    worker = SendingWorker()
    worker.attach()
    assert write(worker, 1, 3) == []
    assert write(worker, 0, 1) == []


@pytest.mark.parametrize("grant_first", [True, False])
def test_no_part_goes_before_the_commit_where_the_first_pages_are_never_sealed(grant_first: bool) -> None:
    """No token to come sees them, or the receiver has them."""
    worker = SendingWorker()
    attached = tx.GrantAttached(a_grant(pages=PAGES[1:], first_page=1), LEASE_ENDS_S)
    if grant_first:
        worker.feed(attached)
    for layer in range(2):
        worker.seal(layer, 1, 3)
    if not grant_first:
        worker.feed(attached)
    for told in [told for told in worker.told if isinstance(told, tx.PostWrites)]:
        assert worker.feed(tx.WriteCompleted(told.write_id)) == []
    assert names(worker.feed(tx.AllComputed(FIRST))) == ["SendCommit"]


def test_a_refused_part_ends_the_attempt_as_a_refused_commit_does() -> None:
    worker = SendingWorker()
    worker.attach()
    write(worker, 0, 1)
    out = worker.feed(tx.RefusalReceived(RefusalReason.DIGEST_MISMATCH))
    assert names(out) == ["Fail", "ReleasePages", "ConfirmIdle"]


def test_a_failed_attempt_tells_of_nothing_more() -> None:
    worker = SendingWorker()
    worker.attach()
    for layer in range(2):
        worker.seal(layer, 0, 2)
    worker.feed(tx.CancelRequested())
    worker.feed(tx.WriteCompleted(0), tx.WriteCompleted(1))
    assert "SendCommitPart" not in names(worker.told)


def test_a_lease_is_needed_until_the_commit_is_answered() -> None:
    needs = {s: SendingWorker().reach(s).handoff.needs_lease for s in ("waiting", "sending", "committed", "draining")}
    assert needs == {"waiting": True, "sending": True, "committed": True, "draining": False}
    assert not SendingWorker().reach("done").handoff.needs_lease


def test_a_stop_before_the_grant_is_known_is_confirmed_with_what_came_along() -> None:
    worker = SendingWorker().reach("waiting")
    out = worker.feed(tx.StopAsked("decode-0#1/1", "decode-0#1", b"given"))
    assert out[1:] == [tx.ReleasePages(KEY, LOCAL), tx.ConfirmIdle(KEY, "decode-0#1/1", "decode-0#1", b"given")]


# ---- the receiver


def with_part(first: int = 0, last: int = 2) -> ReceivingWorker:
    """Open, and this part verified."""
    worker = ReceivingWorker().reach("open")
    part = part_for(worker.grant, first, last)
    assert worker.feed(rx.PartReceived(part)) == [rx.VerifyPart(worker.grant.grant_id, part, PAGES[first:last])]
    assert worker.feed(rx.PartVerified(worker.grant.grant_id, part)) == [rx.ConfirmPart(worker.grant.grant_id)]
    return worker


def test_the_commit_reads_all_pages_those_of_parts_again() -> None:
    worker = with_part(0, 2)
    commit = commit_for(worker.grant)
    out = worker.feed(rx.CommitReceived(commit))
    assert out[-1] == rx.VerifyDigests(worker.grant.grant_id, PAGES, commit.digests)
    admitted = worker.feed(rx.DigestsVerified(worker.grant.grant_id))
    assert admitted[0] == rx.AdmitRequest(worker.grant, commit_for(worker.grant)), "all pages become the request's"


def test_lost_and_reordered_parts_cost_nothing() -> None:
    worker = with_part(1, 2)
    out = worker.feed(rx.CommitReceived(commit_for(worker.grant)))
    assert isinstance(out[-1], rx.VerifyDigests)
    assert out[-1].pages == PAGES


def test_a_repeated_part_is_confirmed_without_reading_again() -> None:
    worker = with_part()
    assert worker.feed(worker.event("part")) == [rx.ConfirmPart(worker.grant.grant_id)]


def test_a_part_is_compared_with_its_own_pages_only() -> None:
    class Counted(dict[int, tuple[int, ...]]):
        """Pages that were looked at."""

        seen = 0

        def __iter__(self) -> Iterator[int]:
            self.seen += len(self)
            return super().__iter__()

        def items(self) -> ItemsView[int, tuple[int, ...]]:
            self.seen += len(self)
            return super().items()

        def get(self, key: int, default: Any = None) -> Any:
            self.seen += 1
            return super().get(key, default)

    record = GrantRecord(KEY, 0.0, grant=a_grant(), verified=Counted({index: (index, index) for index in range(1000)}))
    assert record.drop_contradicted(1000, ((1000, 1001), (1000, 1001))) == []
    assert record.verified.seen <= 2  # type: ignore[attr-defined]


@pytest.mark.parametrize("event", ["cancel", "lapse", "idle", "exit"])
def test_verified_pages_need_no_fence_and_the_others_do(event: str) -> None:
    worker = with_part()
    verified = ((0, PAGES[0]), (1, PAGES[1]))
    if event == "lapse":
        worker.now_s += RECEIVER_LIMITS.lease_s
        out = worker.feed(rx.Tick())
    else:
        out = worker.feed(worker.event(event))
    grant_id = worker.grant.grant_id
    if event in ("cancel", "lapse"):
        assert out[0] == rx.QuarantinePages(KEY, grant_id, LAST, verified)
        assert worker.handoffs.num_quarantined_pages == 1
        assert worker.feed(worker.event("idle"))[-1] == rx.LiftQuarantine(KEY, grant_id, LAST)
        assert worker.handoffs.num_quarantined_pages == 0
    else:
        assert out[-1] == rx.FreePages(KEY, grant_id, LAST, verified)


@pytest.mark.parametrize("ends", [["idle"], ["exit"], ["cancel", "idle"], ["commit", "verified"], ["commit", "wrong"]])
def test_an_ended_grant_is_remembered_without_its_digests(ends: list[str]) -> None:
    worker = with_part()
    said = {
        "verified": rx.DigestsVerified(worker.grant.grant_id),
        "wrong": rx.DigestsVerified(worker.grant.grant_id, ((0, PAGES[2]),)),
    }
    for event in ends:
        worker.feed(said.get(event) or worker.event(event))
    record = worker.handoffs.record(KEY)
    assert record is not None
    assert record.state in ENDED
    assert (record.commit, record.verified) == (None, {})


def test_a_commit_with_a_wrong_page_keeps_the_verified_ones() -> None:
    worker = with_part()
    worker.feed(rx.CommitReceived(commit_for(worker.grant)))
    out = worker.feed(rx.DigestsVerified(worker.grant.grant_id, ((0, PAGES[2]),)))
    assert out[0] == rx.FreePages(KEY, worker.grant.grant_id, LAST, ((0, PAGES[0]), (1, PAGES[1])))


@pytest.mark.parametrize("cancelled", [False, True])
def test_a_page_that_changed_since_its_part_is_not_kept(cancelled: bool) -> None:
    worker = with_part()
    worker.feed(rx.CommitReceived(commit_for(worker.grant)))
    if cancelled:
        worker.feed(worker.event("cancel"))
    out = worker.feed(rx.DigestsVerified(worker.grant.grant_id, ((1, PAGES[0]),)))
    assert out[0] == rx.FreePages(KEY, worker.grant.grant_id, (PAGES[0], PAGES[2]), ((1, PAGES[1]),))


def test_a_sender_that_contradicts_its_part_is_believed_in_nothing_of_it() -> None:
    worker = with_part()
    digests = ((0, digest_of(0, 1), digest_of(0, 2)), tuple(digest_of(1, i) for i in range(3)))
    out = worker.feed(rx.CommitReceived(commit_for(worker.grant, digests=digests)))
    assert names(out) == ["EndWrites", "FreePages", "SendRefusal"]
    assert out[1] == rx.FreePages(KEY, worker.grant.grant_id, (PAGES[0], PAGES[2]), ((1, PAGES[1]),))
    assert isinstance(out[2], rx.SendRefusal)
    assert out[2].reason is RefusalReason.DIGEST_MISMATCH

    worker = with_part()
    part = part_for(worker.grant, 1, 2, digests=((0,), (0,)))
    out = worker.feed(rx.PartReceived(part))
    assert names(out) == ["QuarantinePages", "AskWriterToStop", "SendRefusal"]
    assert out[0] == rx.QuarantinePages(KEY, worker.grant.grant_id, PAGES[1:], ((0, PAGES[0]),))


def test_a_wrong_page_in_a_part_stops_the_writer() -> None:
    worker = ReceivingWorker().reach("open")
    out = worker.feed(rx.PartVerified(worker.grant.grant_id, part_for(worker.grant), ((1, PAGES[0]),)))
    assert names(out) == ["QuarantinePages", "AskWriterToStop", "SendRefusal"]
    assert out[0] == rx.QuarantinePages(KEY, worker.grant.grant_id, PAGES)
    assert worker.handoffs.num_quarantined_pages == 3


BAD: list[tuple[dict[str, object], RefusalReason]] = [
    ({"first_index": 2}, RefusalReason.OUTSIDE_GRANT),
    ({"first_index": -1}, RefusalReason.OUTSIDE_GRANT),
    ({"digests": ()}, RefusalReason.INCOMPLETE),
    ({"digests": ((1, 2),)}, RefusalReason.INCOMPLETE),
    ({"digests": ((1, 2), (1,))}, RefusalReason.INCOMPLETE),
]


@pytest.mark.parametrize(("changes", "reason"), BAD)
def test_a_part_that_cannot_be_of_the_grant_stops_the_writer(changes: dict[str, object], reason: RefusalReason) -> None:
    worker = ReceivingWorker().reach("open")
    out = worker.feed(rx.PartReceived(part_for(worker.grant, **changes)))
    assert isinstance(out[-1], rx.SendRefusal)
    assert out[-1].reason is reason
    assert worker.state is GrantState.QUARANTINED


def test_what_is_verified_after_the_grant_has_ended_counts_for_nothing() -> None:
    worker = ReceivingWorker().reach("open")
    grant, part = worker.grant, part_for(worker.grant)
    worker.feed(rx.PartReceived(part), rx.RequestCancelled(KEY))
    assert names(worker.feed(rx.PartVerified(grant.grant_id, part))) == ["SendRefusal"]
    assert worker.feed(worker.event("idle"))[-1] == rx.LiftQuarantine(KEY, grant.grant_id, PAGES)
    worker.now_s += RECEIVER_LIMITS.remember_s
    worker.feed(rx.Tick())
    assert worker.feed(rx.PartVerified(grant.grant_id, part)) == [], "it is forgotten"


# ---- who may speak

FORGED = b"\0" * 32
SAID = {
    "attach": lambda grant_id, capability: rx.GrantGivenOut(grant_id, SENDER, capability),
    "renew": lambda grant_id, capability: rx.LeaseRenewed(grant_id, SENDER, capability),
    "idle": lambda grant_id, capability: rx.WriterConfirmedIdle(grant_id, SENDER, capability),
}
STATES = ["granted", "open", "verifying", "abandoned", "quarantined", "admitted", "refused"]


@pytest.mark.parametrize("what", [*SAID, "part", "commit"])
@pytest.mark.parametrize("state", STATES)
def test_without_the_capability_nothing_that_is_said_counts(state: str, what: str) -> None:
    worker = ReceivingWorker().reach(state)
    grant = worker.grant
    worker.now_s += 1
    due_s = worker.handoffs.next_deadline_s()
    for capability in (b"", FORGED, grant.capability[:-1], other_capability()):
        event: rx.ReceiverEvent
        if what == "part":
            event = rx.PartReceived(part_for(grant, capability=capability))
        elif what == "commit":
            event = rx.CommitReceived(commit_for(grant, capability=capability))
        else:
            event = SAID[what](grant.grant_id, capability)
        assert worker.feed(event) == [rx.SendRefusal(KEY, grant.grant_id, RefusalReason.BAD_CAPABILITY)]
        assert worker.state.value == state
        assert worker.handoffs.next_deadline_s() == due_s


def other_capability() -> bytes:
    """That of the same grant by a receiver with another secret."""
    worker = ReceivingWorker()
    worker.handoffs._secret = b"of another incarnation"
    return worker.reach("granted").grant.capability


def test_a_capability_is_of_one_grant_only() -> None:
    worker = ReceivingWorker()
    seen = set()
    for attempt in range(1, 4):
        key = AttemptKey("request", attempt)
        worker.feed(rx.ReserveReceived(key), rx.ReservationGranted(key, PAGES))
        seen.add(worker.grant_of(key).capability)
    assert len(seen) == 3
    assert {len(capability) for capability in seen} == {32}


CHANGES: list[dict[str, object]] = [
    {"grant_id": "decode-0#1/2"},
    {"key": AttemptKey(KEY.request_id, 2)},
    {"key": AttemptKey("another", KEY.attempt)},
    {"epoch": 2},
    {"receiver": "decode-0#2"},
    {"pages": PAGES[::-1]},
    {"pages": PAGES[:2]},
    {"first_page": 1},
]


@pytest.mark.parametrize("change", CHANGES, ids=[" ".join(c) for c in CHANGES])
def test_all_that_a_grant_allows_is_in_its_capability(change: dict[str, object]) -> None:
    assert make_capability(a_grant(**change), SECRET) != make_capability(a_grant(), SECRET)
    assert make_capability(a_grant(), SECRET) == make_capability(a_grant(lease_s=1.0), SECRET)


def test_names_that_run_into_each_other_have_capabilities_of_their_own() -> None:
    one = a_grant(grant_id="a", key=AttemptKey("bc", 1))
    other = a_grant(grant_id="ab", key=AttemptKey("c", 1))
    assert make_capability(one, SECRET) != make_capability(other, SECRET)


@pytest.mark.parametrize("message", [part_for, commit_for])
def test_another_writer_with_the_capability_is_still_not_the_writer(message: object) -> None:
    worker = ReceivingWorker().reach("open")
    said = message(worker.grant, sender="prefill-9#1")  # type: ignore[operator]
    event = rx.PartReceived(said) if isinstance(said, CommitPart) else rx.CommitReceived(said)
    (refusal,) = worker.feed(event)
    assert isinstance(refusal, rx.SendRefusal)
    assert refusal.reason is RefusalReason.WRONG_SENDER
    idle = rx.WriterConfirmedIdle(worker.grant.grant_id, "prefill-9#1", worker.grant.capability)
    assert names(worker.feed(idle)) == ["SendRefusal"]
    assert worker.state is GrantState.OPEN


def test_a_secret_that_can_be_guessed_is_refused() -> None:
    with pytest.raises(ValueError, match="16 bytes"):
        type(ReceivingWorker().handoffs)("decode-0#1", a_grant().layout, secret=b"short")
