"""Each guard of the handoff, taken out: the schedules must miss it. So their checks can fail."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from kvtransfer.protocol import grant_book, grants, receiver
from kvtransfer.protocol import receiver_events as rx
from kvtransfer.protocol import sender_events as tx
from kvtransfer.protocol.attempts import SenderState
from kvtransfer.protocol.grant_book import GrantBook
from kvtransfer.protocol.grants import GrantRecord, GrantState
from kvtransfer.protocol.messages import RefusalReason
from kvtransfer.protocol.receiver import TRANSITIONS as RECEIVER
from kvtransfer.protocol.receiver import ReceiverHandoffs
from kvtransfer.protocol.sender import TRANSITIONS as SENDER
from kvtransfer.protocol.sender import SenderHandoff
from router.request.journal import ChoiceRecord, Journal
from tests.support.protocol_world import World

pytestmark = pytest.mark.long

NUM_SCHEDULES = 1000
Patch = Callable[[pytest.MonkeyPatch], None]


def find_violation(first: int) -> tuple[int, str] | None:
    """The first schedule from this one on, round about, that breaks an invariant, and what it broke; `None` when all
    hold."""
    for number in (*range(first, NUM_SCHEDULES), *range(first)):
        try:
            run(number)
        except AssertionError as error:
            return number, str(error)
    return None


def run(number: int) -> None:
    World(random.Random(number).randbytes(300)).run()


# ---- the receiver


def free_at_once(self: GrantBook, record: GrantRecord, reason: RefusalReason, now_s: float) -> None:
    """No quarantine: a cancelled or expired grant frees its pages."""
    self._move(record, GrantState.REFUSED, now_s, reason)
    self._out.append(rx.FreePages(record.key, record.held.grant_id, record.unverified_pages, record.verified_pages))


def silence_is_a_fence(self: GrantBook, record: GrantRecord, now_s: float) -> None:
    """Quarantine is lifted after lease and grace, whether the writer is gone or not."""
    if now_s >= max(record.since_s, record.lease_ends_s) + self.limits.grace_s:
        assert record.reason is not None
        self._end(record, record.reason, now_s)


def admit_anything(self: ReceiverHandoffs, record: Any, event: Any, now_s: float, reason: Any) -> None:
    """Digests of a commit are not looked at."""
    ReceiverHandoffs._verified(self, record, rx.DigestsVerified(event.grant_id), now_s, reason)


def keep_anything(self: ReceiverHandoffs, record: Any, event: Any, now_s: float, reason: Any) -> None:
    """Digests of a part are not looked at."""
    ReceiverHandoffs._part_verified(self, record, rx.PartVerified(event.grant_id, event.part), now_s, reason)


def part_counts_at_once(self: ReceiverHandoffs, record: Any, event: Any, now_s: float, reason: Any) -> None:
    """Pages of a part are verified because the sender says so."""
    if grants.find_part_problem(event.part, record.held) is None:
        record.note_verified(event.part)


def free_while_read(self: ReceiverHandoffs, record: Any, event: Any, now_s: float, reason: Any) -> None:
    """A cancel frees pages whose digests are being read."""
    self._end(record, reason, now_s)


def attach_unnoticed(self: ReceiverHandoffs, record: Any, event: Any, now_s: float, reason: Any) -> None:
    """A writer is let in, and the grant still counts as known to nobody."""
    record.sender = event.sender
    self._out.append(rx.ConfirmAttached(record.held, event.sender))


def without(ignored: RefusalReason) -> Patch:
    """One check of what a sender says about its grant is left out."""
    real = grants.find_contradiction

    def find(said: Any, record: Any, incarnation: str) -> RefusalReason | None:
        reason = real(said, record, incarnation)
        return None if reason is ignored else reason

    return lambda m: m.setattr(grant_book, "find_contradiction", find)


def no_capability(m: pytest.MonkeyPatch) -> None:
    for module in (grants, grant_book):
        m.setattr(module, "is_capability_of", lambda grant, capability: True)


def any_exit_fences_all(self: ReceiverHandoffs, event: Any, now_s: float) -> list[rx.ReceiverInstruction]:
    """The exit of one writer counts for the grants of all."""
    if not isinstance(event, rx.WriterExited):
        return REAL_HANDLE(self, event, now_s)
    senders = {r.sender for r in self._records.values() if r.sender}
    return [told for sender in senders for told in REAL_HANDLE(self, rx.WriterExited(sender), now_s)]


REAL_HANDLE = ReceiverHandoffs.handle

# ---- the sender


def failure_is_success(self: SenderHandoff, event: Any, now_s: float) -> None:
    """A failed write counts as written, so that its grant is committed."""
    SenderHandoff._completed(self, event, now_s)


def idle_at_once(self: SenderHandoff) -> None:
    """The receiver is told that nothing is outstanding, without looking."""
    self._release(self._held - self._busy_pages())
    self._move(SenderState.DONE)
    if self.grant is not None:
        self._confirm_idle(self.grant)


def commit_part_of_what_is_sealed(self: SenderHandoff, event: Any, now_s: float) -> None:
    """Parts are told as pages are sealed, while their writes are outstanding."""
    SenderHandoff._seal(self, event, now_s)
    if self.state is SenderState.SENDING:
        self._written.add(run for batch in self._outstanding.values() for run in batch.runs)
        self._commit_part()


# ---- the journal

REAL_ACCEPT = Journal.accept
REAL_OUT_OF_ORDER = Journal._out_of_order


def take_any_attempt(self: Journal, token: Any) -> Any:
    return REAL_ACCEPT(self, type(token)(self.attempt, token.choice, token.index, token.token_id, token.finish_reason))


def take_any_index(self: Journal, token: Any) -> Any:
    """Repeated and early tokens are given out as they come."""
    choice = self.choices[token.choice]
    if token.attempt != self.attempt or choice.is_finished:
        return []
    return self._give_out(choice, [token])


def end_early(self: Journal, choice: ChoiceRecord, token: Any) -> None:
    """A last token ends its choice, also when others before it are still to come."""
    REAL_OUT_OF_ORDER(self, choice, token)
    if token.finish_reason is not None:
        self.finish(token.choice)


def keep_early(self: Journal) -> int:
    """What came early in one attempt is given out in the next."""
    self.attempt += 1
    return self.attempt


def sender_row(state: SenderState, event: type, handler: Any) -> Patch:
    return lambda m: m.setitem(SENDER, (state, event), handler)


def receiver_row(state: GrantState, event: type, handler: Any) -> Patch:
    return lambda m: m.setitem(RECEIVER, (state, event), handler)


GUARDS: Sequence[tuple[str, Patch, str]] = [
    ("quarantine on stop", lambda m: m.setattr(GrantBook, "_stop", free_at_once), "may still write it"),
    ("fence before lift", lambda m: m.setattr(GrantBook, "_kill_if_silent", silence_is_a_fence), "may still write it"),
    ("digests of a commit", receiver_row(GrantState.VERIFYING, rx.DigestsVerified, admit_anything), "never sealed"),
    ("digests of a part", receiver_row(GrantState.OPEN, rx.PartVerified, keep_anything), "never sealed"),
    ("parts are read", receiver_row(GrantState.OPEN, rx.PartReceived, part_counts_at_once), "never sealed"),
    ("pages being read", receiver_row(GrantState.VERIFYING, rx.RequestCancelled, free_while_read), "were read"),
    ("attach is noticed", receiver_row(GrantState.GRANTED, rx.GrantGivenOut, attach_unnoticed), "may still write it"),
    ("one writer's exit", lambda m: m.setattr(ReceiverHandoffs, "handle", any_exit_fences_all), "which is free"),
    ("capability", no_capability, "was written after its commit"),
    ("epoch", without(RefusalReason.WRONG_EPOCH), "another grant's commit"),
    ("attempt", without(RefusalReason.WRONG_ATTEMPT), "another grant's commit"),
    ("receiver", without(RefusalReason.WRONG_RECEIVER), "another grant's commit"),
    ("sender", without(RefusalReason.WRONG_SENDER), "another writer committed"),
    (
        "contents of a commit",
        lambda m: m.setattr(receiver, "find_problem", lambda commit, grant: None),
        "another grant's commit",
    ),
    (
        "only verified pages skip the fence",
        lambda m: m.setattr(GrantRecord, "unverified_pages", property(lambda r: r.held.pages[-1:])),
        "leaks",
    ),
    ("lease before each post", lambda m: m.setattr(SenderHandoff, "may_post", lambda s, _: True), "after its lease"),
    ("failed write", sender_row(SenderState.SENDING, tx.WriteFailed, failure_is_success), "may still write it"),
    ("busy source pages", lambda m: m.setattr(SenderHandoff, "_busy_pages", lambda s: set()), "under a write"),
    ("idle when idle", lambda m: m.setattr(SenderHandoff, "_drain", idle_at_once), "may still write it"),
    (
        "parts of completed writes",
        sender_row(SenderState.SENDING, tx.PagesSealed, commit_part_of_what_is_sealed),
        "may still write it",
    ),
    ("journal: stale attempts", lambda m: m.setattr(Journal, "accept", take_any_attempt), "is given"),
    ("journal: order and repeats", lambda m: m.setattr(Journal, "accept", take_any_index), "is given"),
    ("journal: an early end", lambda m: m.setattr(Journal, "_out_of_order", end_early), "was cut"),
    ("journal: early ones of a past attempt", lambda m: m.setattr(Journal, "next_attempt", keep_early), "is given"),
]


#: Where the search begins, of guards that few schedules need.
RARE = {
    "digests of a part": 191,
    "parts are read": 191,
    "epoch": 734,
    "attempt": 110,
    "receiver": 372,
    "sender": 147,
    "contents of a commit": 147,
    "lease before each post": 159,
    "parts of completed writes": 50,
    "journal: stale attempts": 100,
}


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("name", "take_out", "damage"), GUARDS, ids=[g[0] for g in GUARDS])
def test_each_guard_is_missed(name: str, take_out: Patch, damage: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        take_out(patch)
        violation = find_violation(RARE.get(name, 0))
    assert violation is not None, f"{NUM_SCHEDULES} schedules hold without it"
    number, broken = violation
    assert damage in broken, f"schedule {number}: {broken}"
    run(number)  # which holds with all guards
