"""What follows an attempt: a table of ends and of the next attempts that they lead to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.layout import KvFormat, LayoutId
from router.policy.choose import choose
from router.policy.losses import Fate, Losses
from router.policy.recovery import PLANNED, AttemptEnd, Fault, Plan, Recovery, RecoveryLimits, failure
from router.policy.retry_budget import RetryBudget
from router.policy.route import RequestFacts, Route, Why, Wishes
from router.policy.snapshot import Snapshot
from router.policy.worker_load import WorkerLoad
from tandem.core.clock import VirtualClock
from tandem.core.errors import (
    DrainingError,
    HandoffError,
    InvalidRequestError,
    OverloadedError,
    TandemError,
    TransportError,
    WorkerLostError,
    WorkersDiedError,
)
from tandem.core.identity import WorkerKey

P0, P1, D0, D1 = (WorkerKey(name, "1") for name in ("prefill-0", "prefill-1", "decode-0", "decode-1"))
LOST, DRAINING, BUSY = WorkerLostError("lost"), DrainingError("leaves"), OverloadedError("full", retry_after_s=3.0)
FORMAT = KvFormat(LayoutId("w", "f", num_layers=1, num_kv_heads=1, head_dim=8, page_size=32), "ucx")
LIMITS = RecoveryLimits(max_attempts=3, local_prefill_tokens=512, max_rest_s=10.0)


def recovery(limits: RecoveryLimits = LIMITS, *, share: float = 0.0, burst: int = 100) -> Recovery:
    return Recovery(limits, RetryBudget(share, burst, VirtualClock()))


def after(state: Recovery, end: AttemptEnd, now_s: float) -> Plan:
    """Where nobody waits for word of those that were lost."""
    state.learn(end, now_s)
    return state.after(end)


def ended(fault: Fault, worker: WorkerKey, error: TandemError, *, prefill: WorkerKey | None = P0) -> AttemptEnd:
    return AttemptEnd(fault, worker, error, prefill, D0)


@dataclass(frozen=True)
class Case:
    name: str
    end: AttemptEnd
    prefill: WorkerKey | None = None
    decode: WorkerKey | None = None
    local: int = 0
    avoid: frozenset[WorkerKey] = frozenset()
    exclude: frozenset[WorkerKey] = frozenset()
    counts: bool = True


CASES = [
    Case("prefill died", ended(Fault.DIED, P0, LOST), decode=D0, local=512, avoid=frozenset({P0})),
    Case("decode died", ended(Fault.DIED, D0, LOST), prefill=P0, avoid=frozenset({D0})),
    Case("decode died, computing alone", ended(Fault.DIED, D0, LOST, prefill=None), avoid=frozenset({D0})),
    Case("their connection broke", ended(Fault.LINK_BROKEN, P0, LOST), prefill=P0, avoid=frozenset({D0})),
    Case(
        "prefill died, by decode's word",
        AttemptEnd(Fault.DIED, P0, LOST, P0, D0, is_exit_proven=True),
        decode=D0,
        local=512,
        avoid=frozenset({P0}),
        exclude=frozenset({P0}),
    ),
    Case("between the two", ended(Fault.FAILED, D0, TransportError("broke")), avoid=frozenset({P0, D0})),
    Case("decode alone failed", ended(Fault.FAILED, D0, LOST, prefill=None), avoid=frozenset({D0})),
    Case("prefill is full", ended(Fault.OVERLOADED, P0, BUSY), decode=D0, avoid=frozenset({P0})),
    Case("decode is full", ended(Fault.OVERLOADED, D0, BUSY), prefill=P0, avoid=frozenset({D0})),
    Case("prefill refuses", ended(Fault.REFUSED, P0, DRAINING), decode=D0, exclude=frozenset({P0}), counts=False),
    Case("decode refuses", ended(Fault.REFUSED, D0, DRAINING), prefill=P0, exclude=frozenset({D0}), counts=False),
    Case("decode drains", ended(Fault.MOVED, D0, DRAINING), prefill=P0, exclude=frozenset({D0}), counts=False),
    Case("prefill left", ended(Fault.LEFT, P0, LOST), decode=D0, local=512, exclude=frozenset({P0}), counts=False),
    Case("decode left", ended(Fault.LEFT, D0, LOST), prefill=P0, exclude=frozenset({D0}), counts=False),
    Case("prefill is silent, and has not begun", ended(Fault.SILENT, P0, LOST), decode=D0, avoid=frozenset({P0})),
    Case("decode is silent, and has not begun", ended(Fault.SILENT, D0, LOST), prefill=P0, avoid=frozenset({D0})),
    Case("no prefill for a grant", ended(Fault.UNSERVED, D0, LOST, prefill=None), decode=D0, counts=False),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_each_end_leads_to_its_next_attempt(case: Case) -> None:
    state = recovery()
    plan = after(state, case.end, 0.0)
    assert plan.wishes == Wishes(case.prefill, case.decode, case.local, case.avoid, case.exclude)
    assert state.num_failures == int(case.counts)
    assert state._budget.num_left == 100 - int(case.counts)


def test_decode_is_never_asked_to_compute_where_that_is_off() -> None:
    plan = after(recovery(replace(LIMITS, local_prefill_tokens=0)), ended(Fault.DIED, P0, LOST), 0.0)
    assert (plan.wishes.max_local_tokens, plan.wishes.decode) == (0, D0)


# -- deaths and lost connections


def fates(**named: Fate) -> Callable[[WorkerKey], Fate]:
    """Of workers by their ids, with `_` for `-`; of all others nothing is known."""
    return lambda key: named.get(key.worker_id.replace("-", "_"), Fate.UNKNOWN)


NOTHING_KNOWN = fates()
ENDED, HEARD = Fate.ENDED, Fate.HEARD


def test_two_deaths_are_the_end_and_one_worker_dies_once() -> None:
    state = recovery(replace(LIMITS, max_attempts=9))
    died = fates(decode_0=ENDED, prefill_0=ENDED)
    for end in (
        ended(Fault.DIED, D0, LOST),
        ended(Fault.DIED, D0, LOST),
        ended(Fault.FAILED, D0, TransportError("broke")),
        ended(Fault.LEFT, D1, LOST),
    ):
        after(state, end, 0.0)
        assert not state.must_wait(died, end.error)
    state.learn(ended(Fault.DIED, P0, LOST), 0.0)
    with pytest.raises(WorkersDiedError, match=r"decode-0/1 and prefill-0/1 died") as error:
        state.must_wait(died, LOST)
    assert not error.value.retryable


def test_a_lost_worker_that_is_heard_again_has_not_died() -> None:
    state = recovery()
    state.learn(ended(Fault.DIED, D0, LOST), 0.0)
    assert not state.must_wait(NOTHING_KNOWN, LOST), "with one the request goes on at once"
    state.learn(ended(Fault.DIED, D1, LOST), 0.0)
    assert state.must_wait(NOTHING_KNOWN, LOST)
    assert not state.must_wait(fates(decode_0=HEARD), LOST)
    assert state.losses.missing == {D1}
    state.learn(ended(Fault.DIED, P0, LOST), 0.0)
    assert state.must_wait(fates(decode_0=ENDED), LOST), "it is none of those that are missing any more"
    assert not state.must_wait(fates(prefill_0=HEARD, decode_1=ENDED), LOST)
    assert state.losses.died == {D1}


def test_with_one_death_proven_the_request_waits_for_word_of_the_other_worker() -> None:
    state = recovery()
    state.learn(ended(Fault.DIED, D0, LOST), 0.0)
    state.learn(ended(Fault.DIED, D1, LOST), 0.0)
    assert state.must_wait(fates(decode_0=ENDED), LOST)
    with pytest.raises(WorkersDiedError):
        state.must_wait(fates(decode_1=ENDED), LOST)


def test_an_exit_that_another_worker_saw_needs_no_further_word() -> None:
    state = recovery()
    for worker in (P0, D0):
        state.learn(AttemptEnd(Fault.DIED, worker, LOST, P0, D0, is_exit_proven=True), 0.0)
    with pytest.raises(WorkersDiedError):
        state.must_wait(fates(prefill_0=HEARD, decode_0=HEARD), LOST)  # the router's own streams have yet to break


def test_without_word_of_those_that_were_lost_the_error_says_so_and_may_be_tried_again() -> None:
    state = recovery()
    state.learn(ended(Fault.DIED, D0, LOST), 0.0)
    state.losses.note_lost(P0)
    error = state.nothing_was_heard(12.0, LOST)
    assert error.retryable
    assert "decode-0/1 and prefill-0/1 were lost" in error.message
    assert "12 s" in error.message


def test_a_death_that_the_attempt_survived_counts() -> None:
    state = recovery()
    state.losses.note_lost(P0)
    state.learn(ended(Fault.DIED, D0, LOST), 0.0)
    with pytest.raises(WorkersDiedError):
        state.must_wait(fates(prefill_0=ENDED, decode_0=ENDED), LOST)


def test_a_request_moves_on_although_two_workers_have_died() -> None:
    state = recovery()
    after(state, ended(Fault.DIED, D1, LOST), 0.0)
    state.losses.note_lost(P0)
    assert after(state, ended(Fault.MOVED, D0, DRAINING), 0.0).wishes.prefill == P0


def test_a_request_leaves_a_silent_worker_early_only_where_that_cannot_end_it() -> None:
    assert recovery().may_leave_early()
    assert not recovery(burst=0).may_leave_early()
    assert not recovery(replace(LIMITS, max_attempts=1)).may_leave_early()
    state = recovery()
    state.learn(ended(Fault.SILENT, P0, LOST), 0.0)
    assert not state.may_leave_early(), "it may be what silences them"
    assert not state.must_wait(fates(prefill_0=HEARD), LOST)
    assert state.may_leave_early()


@given(st.lists(st.tuples(st.sampled_from([P0, P1, D0, D1]), st.sampled_from(list(Fate))), max_size=30))
def test_a_request_is_given_to_nobody_while_two_may_have_died(steps: list[tuple[WorkerKey, Fate]]) -> None:
    """Whatever becomes known of them, and when: what has ended stays so, and what is heard is not missed."""
    losses, last = Losses(), dict[WorkerKey, Fate]()
    for worker, fate in steps:
        losses.note_lost(worker)
        last[worker] = fate
        losses.learn(lambda key: last.get(key, Fate.UNKNOWN))
        assert not losses.died & losses.missing
        assert not [key for key in losses.missing if last[key] is not Fate.UNKNOWN]
        assert losses.may_be_too_many == (len(losses.died | losses.missing) >= 2)
        assert losses.are_too_many == (len(losses.died) >= 2)


def test_a_decode_worker_that_was_left_before_it_had_begun_is_not_lost_with_the_request() -> None:
    state = recovery()
    plan = after(state, ended(Fault.SILENT, D0, LOST), 0.0)
    assert D0 in plan.wishes.avoid
    assert state.may_leave_early()
    state.learn(ended(Fault.DIED, D1, LOST), 0.0)
    assert not state.must_wait(fates(decode_0=ENDED, decode_1=ENDED), LOST)
    assert state.losses.died == {D1}


# -- the last attempt


def test_after_the_last_attempt_the_error_is_the_attempts_own() -> None:
    state, broke = recovery(), TransportError("broke")
    for _ in range(2):
        after(state, ended(Fault.FAILED, D0, TransportError("before")), 0.0)
        after(state, ended(Fault.REFUSED, D1, DRAINING), 0.0)
    with pytest.raises(TransportError) as error:
        after(state, ended(Fault.FAILED, D0, broke), 0.0)
    assert error.value is broke


def test_what_no_retry_mends_ends_at_once_and_costs_nothing() -> None:
    state = recovery()
    with pytest.raises(InvalidRequestError):
        after(state, ended(Fault.FAILED, P0, InvalidRequestError("no")), 0.0)
    assert state._budget.num_left == 100


def test_a_spent_budget_ends_the_request_with_its_own_error_and_says_so() -> None:
    state = recovery(burst=1)
    after(state, ended(Fault.DIED, D0, LOST), 0.0)
    after(state, ended(Fault.MOVED, D1, DRAINING), 0.0)
    with pytest.raises(WorkerLostError, match="lost") as error:
        after(state, ended(Fault.DIED, D0, LOST), 0.0)
    assert "retry budget is spent" in error.value.message
    assert error.value.retryable
    assert LOST.message == "lost", "others hold the same error"


def test_an_overloaded_worker_rests_for_as_long_as_it_asks_within_bounds() -> None:
    state = recovery()
    plan = after(state, ended(Fault.OVERLOADED, D0, BUSY), 100.0)
    assert plan.rests_until_s(Route(P0, D0, 0, Why.LOAD)) == 103.0
    assert plan.rests_until_s(Route(P0, D1, 0, Why.LOAD)) == 0.0
    plan = after(state, ended(Fault.OVERLOADED, P0, OverloadedError("full", retry_after_s=1e9)), 100.0)
    assert plan.rests_until_s(Route(P0, D0, 0, Why.LOAD)) == 110.0


@pytest.mark.parametrize(
    ("error", "worker", "fault", "whose"),
    [
        (HandoffError("", reason="writer_exited"), D0, Fault.DIED, P0),
        (HandoffError("", reason="writer_exited"), P0, Fault.FAILED, P0),  # decode does not know it: no proof
        (HandoffError("", reason="receiver_exited"), P0, Fault.DIED, D0),
        (HandoffError("", reason="receiver_exited"), D0, Fault.FAILED, D0),
        (HandoffError("", reason="draining"), P0, Fault.REFUSED, D0),
        (HandoffError("", reason="digest_mismatch"), D0, Fault.FAILED, D0),
        (HandoffError("", reason="link_broken"), P0, Fault.LINK_BROKEN, P0),
        (DRAINING, P0, Fault.REFUSED, P0),
        (BUSY, D0, Fault.OVERLOADED, D0),
        (TransportError(""), P0, Fault.FAILED, P0),
    ],
)
def test_what_a_reported_failure_means(error: TandemError, worker: WorkerKey, fault: Fault, whose: WorkerKey) -> None:
    end = failure(error, worker, P0, D0)
    assert (end.fault, end.worker) == (fault, whose)
    assert end.is_exit_proven == (fault is Fault.DIED)
    assert (end.prefill, end.decode) == (P0, D0)


@pytest.mark.parametrize(
    ("reason", "worker", "whose"), [("writer_exited", D0, P0), ("receiver_exited", P0, D0)], ids=["prefill", "decode"]
)
def test_the_exit_of_a_worker_that_was_leaving_is_no_death(reason: str, worker: WorkerKey, whose: WorkerKey) -> None:
    state, error = recovery(), HandoffError("", reason=reason)
    end = failure(error, worker, P0, D0, leaving=[whose])
    assert (end.fault, end.worker) == (Fault.LEFT, whose)
    plan = after(state, end, 0.0)
    assert whose in plan.wishes.exclude
    assert not state.losses.died | state.losses.missing
    assert state.num_failures == 0
    assert failure(error, worker, P0, D0, leaving=[worker]).fault is Fault.DIED, "who reports it is another matter"


# -- over many failures

KEYS = [WorkerKey(f"{pool}-{n}", "1") for pool in ("prefill", "decode") for n in range(3)]
ERRORS = {Fault.OVERLOADED: BUSY, Fault.REFUSED: DRAINING, Fault.MOVED: DRAINING}


def load(key: WorkerKey) -> WorkerLoad:
    return WorkerLoad(key, FORMAT, 32, 0, 0, 100)


@pytest.mark.long
@given(st.lists(st.tuples(st.sampled_from(list(Fault)), st.booleans()), min_size=40, max_size=40), st.integers(1, 5))
def test_every_request_ends_and_never_asks_who_is_gone(steps: list[tuple[Fault, bool]], max_attempts: int) -> None:
    """Whatever happens to attempts placed by the plans themselves: the request ends, for one of the known reasons."""
    snapshot = Snapshot.of([load(k) for k in KEYS[:3]], [load(k) for k in KEYS[3:]])
    state = recovery(replace(LIMITS, max_attempts=max_attempts), burst=4)
    wishes, gone, num_failures = Wishes(), set[WorkerKey](), 0
    for fault, is_decode in steps:
        try:
            route = choose(snapshot, RequestFacts(10), wishes)
        except TandemError:
            assert len(gone) >= 3
            return
        assert not gone & {route.prefill, route.decode}
        if route.prefill is None:
            is_decode = True
        if fault is Fault.MOVED:
            is_decode = True
        if fault is Fault.UNSERVED and route.prefill is not None:
            continue
        worker = route.decode if is_decode or route.prefill is None else route.prefill
        end = AttemptEnd(fault, worker, ERRORS.get(fault, LOST), route.prefill, route.decode)
        num_failures += fault not in PLANNED
        state.learn(end, 0.0)
        try:
            assert not state.must_wait(lambda _: Fate.ENDED, LOST)
            wishes = state.after(end).wishes
        except WorkersDiedError:
            assert len(state.losses.died) == 2
            return
        except TandemError:
            assert num_failures in (max_attempts, 5)
            return
        assert num_failures < max_attempts
        if fault in (Fault.REFUSED, Fault.MOVED, Fault.LEFT):
            gone.add(worker)
    assert num_failures < max_attempts, "all the rest was skipped"
