"""The sender's table: every state meets every event; then posting, committing, releasing and the times."""

from __future__ import annotations

from dataclasses import replace

import pytest
from handoff_examples import FIRST, KEY, LAYOUT, PAGES, RECEIVER, a_grant, commit_for, digest_of, names
from handoff_workers import LEASE_ENDS_S, LOCAL, SendingWorker
from handoff_workers import SENDER_LIMITS as LIMITS

from kvtransfer.extents import PageWrite
from kvtransfer.protocol import sender_events as ev
from kvtransfer.protocol.arrivals import ExtentRun
from kvtransfer.protocol.attempts import SenderState
from kvtransfer.protocol.messages import AttemptKey, FailureReason, RefusalReason
from kvtransfer.protocol.sender import TRANSITIONS, SenderHandoff
from tandem.core.errors import IllegalTransitionError

GIVEN_BACK = ev.ConfirmIdle(KEY, "decode-0#1/1", RECEIVER, b"given")

EVENTS: dict[str, ev.SenderEvent] = {
    "attach": ev.GrantAttached(a_grant(), LEASE_ENDS_S),
    "extend": ev.LeaseExtended("decode-0#1/1", LEASE_ENDS_S + 10),
    "seal": ev.PagesSealed(1, 0, LOCAL, (tuple(digest_of(1, i) for i in range(3)),)),
    "reseal": ev.PagesSealed(0, 0, LOCAL, (tuple(digest_of(0, i) for i in range(3)),)),
    "room": ev.RoomGiven(1 << 20),
    "overdue": ev.WriteOverdue("a write has not arrived"),
    "written": ev.WriteCompleted(0),
    "failed": ev.WriteFailed(0, "broken", settled=True),
    "failed-open": ev.WriteFailed(0, "broken", settled=False),
    "computed": ev.AllComputed(FIRST),
    "ack": ev.AckReceived("decode-0#1/1"),
    "refusal": ev.RefusalReceived(RefusalReason.LEASE_EXPIRED),
    "cancel": ev.CancelRequested(),
    "stop": ev.StopAsked("decode-0#1/1", RECEIVER, b"given"),
    "receiver-exit": ev.ReceiverExited(),
    "link-closed": ev.LinkClosed(),
    "tick": ev.Tick(),
}
HOLD = "Fail QuarantinePages"
END = "ReleasePages ConfirmIdle"
# state: event: (state after, instructions). `!` is illegal: only this worker's own defect could cause it.
EXPECTED: dict[str, dict[str, tuple[str, str]]] = {
    "waiting": {
        "attach": ("sending", "PostWrites"),
        "extend": ("waiting", ""),
        "seal": ("waiting", ""),
        "reseal": ("waiting", ""),
        "room": ("waiting", ""),
        "overdue": ("waiting", ""),
        "written": ("!", ""),
        "failed": ("!", ""),
        "failed-open": ("!", ""),
        "computed": ("waiting", ""),
        "ack": ("done", "Fail ReleasePages"),
        "refusal": ("done", "Fail ReleasePages"),
        "cancel": ("done", "Fail ReleasePages"),
        "stop": ("done", f"Fail {END}"),
        "receiver-exit": ("done", "Fail ReleasePages"),
        "link-closed": ("waiting", ""),
        "tick": ("waiting", ""),
    },
    "sending": {
        "attach": ("sending", ""),
        "extend": ("sending", ""),
        "seal": ("sending", "PostWrites"),
        "reseal": ("sending", ""),
        "room": ("sending", ""),
        "overdue": ("draining", HOLD),
        "written": ("sending", ""),
        "failed": ("done", f"Fail {END}"),
        "failed-open": ("draining", HOLD),
        "computed": ("sending", ""),
        "ack": ("draining", HOLD),
        "refusal": ("draining", HOLD),
        "cancel": ("draining", HOLD),
        "stop": ("draining", HOLD),
        "receiver-exit": ("done", f"Fail {END}"),
        "link-closed": ("done", f"Fail {END}"),
        "tick": ("sending", ""),
    },
    "committed": {
        "attach": ("committed", ""),
        "extend": ("committed", ""),
        "seal": ("committed", ""),
        "reseal": ("committed", ""),
        "room": ("committed", ""),
        "overdue": ("committed", ""),
        "written": ("committed", ""),
        "failed": ("committed", ""),
        "failed-open": ("committed", ""),
        "computed": ("committed", ""),
        "ack": ("done", "ReleasePages Succeed"),
        "refusal": ("done", f"Fail {END}"),
        "cancel": ("done", f"Fail {END}"),
        "stop": ("done", f"Fail {END}"),
        "receiver-exit": ("done", f"Fail {END}"),
        "link-closed": ("committed", ""),
        "tick": ("committed", ""),
    },
    "draining": {
        "attach": ("draining", ""),
        "extend": ("draining", ""),
        "seal": ("draining", ""),
        "reseal": ("draining", ""),
        "room": ("draining", ""),
        "overdue": ("draining", ""),
        "written": ("done", END),
        "failed": ("done", END),
        "failed-open": ("draining", ""),
        "computed": ("draining", ""),
        "ack": ("draining", ""),
        "refusal": ("draining", ""),
        "cancel": ("draining", ""),
        "stop": ("draining", ""),
        "receiver-exit": ("done", END),
        "link-closed": ("done", END),
        "tick": ("draining", ""),
    },
    "done": {
        "attach": ("done", ""),
        "extend": ("done", ""),
        "seal": ("done", ""),
        "reseal": ("done", ""),
        "room": ("done", ""),
        "overdue": ("done", ""),
        "written": ("done", ""),
        "failed": ("done", ""),
        "failed-open": ("done", ""),
        "computed": ("done", ""),
        "ack": ("done", ""),
        "refusal": ("done", ""),
        "cancel": ("done", ""),
        "stop": ("done", "ConfirmIdle"),
        "receiver-exit": ("done", ""),
        "link-closed": ("done", ""),
        "tick": ("done", ""),
    },
}
CELLS = [(s, e, *expected) for s, row in EXPECTED.items() for e, expected in row.items()]


@pytest.mark.parametrize(("state", "event", "after", "told"), CELLS)
def test_every_state_meets_every_event(state: str, event: str, after: str, told: str) -> None:
    worker = SendingWorker().reach(state)
    if after == "!":
        with pytest.raises(IllegalTransitionError, match="history"):
            worker.feed(EVENTS[event])
        assert worker.handoff.state.value == state
        return
    assert " ".join(names(worker.feed(EVENTS[event]))) == told
    assert worker.handoff.state.value == after


def test_the_table_and_this_walk_cover_each_other() -> None:
    assert {type(e) for e in EVENTS.values()} == {kind for _, kind in TRANSITIONS}
    for state, row in EXPECTED.items():
        for name, (after, _) in row.items():
            assert ((SenderState(state), type(EVENTS[name])) in TRANSITIONS) == (after != "!")


@pytest.mark.parametrize("event", [e for e in EVENTS if e != "stop"])
@pytest.mark.parametrize("state", list(EXPECTED))
def test_a_repeated_message_adds_nothing_but_an_earlier_answer(state: str, event: str) -> None:
    if EXPECTED[state][event][0] == "!":
        return
    worker = SendingWorker().reach(state)
    worker.feed(EVENTS[event])
    again = names(worker.feed(EVENTS[event]))
    assert again == []


# ---- posting


def test_it_computes_before_the_grant_and_posts_after_it() -> None:
    worker = SendingWorker()
    assert worker.seal(0, 0, 2) == []
    assert not worker.handoff.may_post(worker.now_s)
    (post,) = worker.attach()
    assert isinstance(post, ev.PostWrites)
    assert post.writes == (PageWrite(0, 20, PAGES[0]), PageWrite(0, 21, PAGES[1]))
    (post,) = worker.seal(0, 2)
    assert isinstance(post, ev.PostWrites)
    assert post.writes == (PageWrite(0, 30, PAGES[2]),)
    assert worker.handoff.num_bytes_posted == 3 * LAYOUT.extent_bytes


def test_pages_that_the_receiver_has_are_not_sent_but_held_and_released() -> None:
    worker = SendingWorker()
    for layer in range(2):
        worker.seal(layer)
    (post,) = worker.feed(ev.GrantAttached(a_grant(pages=(7,), first_page=2), LEASE_ENDS_S))
    assert isinstance(post, ev.PostWrites)
    assert post.writes == (PageWrite(0, 30, 7), PageWrite(1, 30, 7))
    assert post.runs == (ExtentRun(0, 0, 1), ExtentRun(1, 0, 1)), "as the receiver counts them"
    (send,) = worker.feed(ev.AllComputed(FIRST), ev.WriteCompleted(0))
    assert isinstance(send, ev.SendCommit)
    assert send.commit == commit_for(a_grant(pages=(7,), first_page=2))
    assert worker.feed(ev.AckReceived("decode-0#1/1"))[0] == ev.ReleasePages(KEY, LOCAL)


def test_a_grant_of_no_pages_commits_without_a_write() -> None:
    worker = SendingWorker()
    for layer in range(2):
        worker.seal(layer)
    worker.feed(ev.AllComputed(FIRST))
    (send,) = worker.feed(ev.GrantAttached(a_grant(pages=(), first_page=3), LEASE_ENDS_S))
    assert isinstance(send, ev.SendCommit)
    assert send.commit.digests == ((), ())


def test_nothing_is_posted_close_to_the_end_of_the_lease() -> None:
    worker = SendingWorker().reach("sending")
    worker.now_s = LEASE_ENDS_S - LIMITS.lease_margin_s
    assert not worker.handoff.may_post(worker.now_s)
    out = worker.seal(1)
    assert names(out) == ["Fail", "QuarantinePages"]
    assert isinstance(out[0], ev.Fail)
    assert out[0].reason is FailureReason.LEASE_LOST
    assert out[0].retryable


def test_an_extended_lease_lets_it_go_on() -> None:
    worker = SendingWorker().reach("sending")
    worker.feed(EVENTS["extend"])
    worker.now_s = LEASE_ENDS_S
    assert names(worker.seal(1)) == ["PostWrites"]


def test_a_lease_that_ended_before_the_attach_was_confirmed_posts_nothing() -> None:
    worker = SendingWorker().reach("waiting")
    worker.now_s = LEASE_ENDS_S
    assert names(worker.attach()) == ["Fail", "ReleasePages", "ConfirmIdle"]


def test_the_guard_of_each_post_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SenderHandoff, "may_post", lambda self, now_s: True)
    worker = SendingWorker().reach("sending")
    worker.now_s = LEASE_ENDS_S + 1
    assert "PostWrites" in names(worker.seal(1))


@pytest.mark.parametrize(
    "grant", [a_grant(pages=(1, 2)), a_grant(layout=replace(LAYOUT, head_dim=8)), a_grant(first_page=1)]
)
def test_a_grant_that_does_not_fit_is_given_back(grant: object) -> None:
    worker = SendingWorker().reach("waiting")
    out = worker.feed(ev.GrantAttached(grant, LEASE_ENDS_S))  # type: ignore[arg-type]
    assert names(out) == ["Fail", "ReleasePages", "ConfirmIdle"]
    assert isinstance(out[0], ev.Fail)
    assert (out[0].reason, out[0].retryable) == (FailureReason.GRANT_MISMATCH, False)


# ---- sealing


def test_a_digest_never_changes_once_its_page_is_sealed() -> None:
    worker = SendingWorker().reach("sending")
    with pytest.raises(IllegalTransitionError, match="sealed before"):
        worker.feed(ev.PagesSealed(0, 0, LOCAL[:1], ((5,),)))
    with pytest.raises(IllegalTransitionError, match="not of this prompt"):
        worker.feed(ev.PagesSealed(0, 3, (40,), ((5,),)))
    with pytest.raises(IllegalTransitionError, match="never asked for"):
        worker.feed(ev.WriteCompleted(9))
    with pytest.raises(IllegalTransitionError, match="is for"):
        SendingWorker().feed(ev.GrantAttached(a_grant(key=AttemptKey("other", 1)), LEASE_ENDS_S))


# ---- committing


def test_it_commits_when_the_last_write_ends_with_all_that_was_sealed() -> None:
    worker = SendingWorker().reach("sending")
    worker.seal(1)
    assert worker.feed(ev.AllComputed(FIRST)) == []
    assert worker.feed(ev.WriteCompleted(1)) == []
    assert worker.feed(ev.WriteCompleted(0)) == [ev.SendCommit(commit_for(a_grant()))]


def test_it_does_not_commit_what_was_never_sealed() -> None:
    worker = SendingWorker().reach("sending")
    worker.seal(1, 0, 2)
    out = worker.feed(ev.AllComputed(FIRST), ev.WriteCompleted(1), ev.WriteCompleted(0))
    assert isinstance(out[0], ev.Fail)
    assert out[0].reason is FailureReason.INCOMPLETE


def test_a_failed_write_is_never_committed() -> None:
    worker = SendingWorker().reach("sending")
    worker.seal(1)
    worker.feed(ev.AllComputed(FIRST), ev.WriteFailed(1, "broken", settled=True), ev.WriteCompleted(0))
    assert "SendCommit" not in names(worker.told)
    assert worker.handoff.state is SenderState.DONE


def test_an_unanswered_commit_is_sent_again_and_given_up_in_the_end() -> None:
    worker = SendingWorker().reach("committed")
    repeats = 0
    while worker.handoff.state is SenderState.COMMITTED:
        deadline_s = worker.handoff.next_deadline_s()
        assert deadline_s is not None
        assert deadline_s > worker.now_s
        worker.now_s = deadline_s
        repeats += names(worker.feed(ev.Tick())).count("SendCommit")
    assert repeats == 4
    assert names(worker.told[-3:]) == ["Fail", "ReleasePages", "ConfirmIdle"]


def test_an_ack_for_another_grant_releases_nothing() -> None:
    worker = SendingWorker().reach("committed")
    assert worker.feed(ev.AckReceived("decode-0#1/77")) == []
    assert worker.handoff.num_held_pages == len(LOCAL)


# ---- releasing


def test_pages_under_an_outstanding_write_stay_until_it_is_settled() -> None:
    worker = SendingWorker()
    worker.attach()
    worker.seal(0, 0, 2)
    worker.seal(0, 2, 3)
    worker.feed(ev.WriteCompleted(0))
    out = worker.feed(ev.CancelRequested())
    assert out[1:] == [ev.QuarantinePages(KEY, (30,)), ev.ReleasePages(KEY, (20, 21))]
    assert worker.feed(ev.WriteFailed(1, "lost", settled=False)) == []
    assert worker.handoff.state is SenderState.DRAINING
    out = worker.feed(ev.WriteCompleted(1))
    assert out == [ev.ReleasePages(KEY, (30,)), GIVEN_BACK]


def test_a_write_that_never_ends_is_given_up_but_its_pages_are_not() -> None:
    worker = SendingWorker().reach("sending")
    out = worker.feed(EVENTS["overdue"])
    assert isinstance(out[0], ev.Fail)
    assert out[0].reason is FailureReason.WRITE_TIMEOUT
    assert worker.handoff.num_held_pages == len(LOCAL)
    assert worker.handoff.next_deadline_s() is None
    assert worker.feed(ev.ReceiverExited())[0] == ev.ReleasePages(KEY, LOCAL)


def test_a_late_attach_after_a_cancel_is_given_back() -> None:
    worker = SendingWorker().reach("waiting")
    worker.feed(ev.CancelRequested())
    assert worker.attach() == [GIVEN_BACK]


def test_a_stop_for_a_grant_it_never_used_touches_nothing() -> None:
    worker = SendingWorker().reach("sending")
    stop = ev.StopAsked("decode-0#1/77", RECEIVER, b"another")
    assert worker.feed(stop) == [ev.ConfirmIdle(KEY, stop.grant_id, RECEIVER, b"another")]
    assert worker.handoff.state is SenderState.SENDING


@pytest.mark.parametrize("state", ["sending", "committed"])
def test_a_stop_without_the_grants_capability_is_ignored(state: str) -> None:
    worker = SendingWorker().reach(state)
    assert worker.feed(ev.StopAsked("decode-0#1/1", RECEIVER, b"made up")) == [ev.IgnoreStop("decode-0#1/1")]
    assert worker.handoff.state.value == state


def test_before_the_grant_is_known_only_its_receiver_can_stop_an_attempt() -> None:
    worker = SendingWorker().reach("waiting")
    out = worker.feed(ev.StopAsked("decode-9#1/1", "decode-9#1", b"made up"))
    assert out == [ev.ConfirmIdle(KEY, "decode-9#1/1", "decode-9#1", b"made up")]
    assert names(worker.attach()) == ["PostWrites"]


@pytest.mark.parametrize("reason", list(RefusalReason))
def test_a_refusal_says_whether_a_new_attempt_makes_sense(reason: RefusalReason) -> None:
    worker = SendingWorker().reach("committed")
    failure = worker.feed(ev.RefusalReceived(reason))[0]
    assert isinstance(failure, ev.Fail)
    assert (failure.refusal, failure.retryable) == (reason, reason.retryable)


def test_the_grant_of_the_examples_is_the_receivers() -> None:
    assert a_grant().receiver == RECEIVER
