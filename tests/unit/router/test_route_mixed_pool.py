"""Which prompts decode computes by itself is a pure function of a snapshot."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.layout import KvFormat, LayoutId
from router.policy.choose import choose
from router.policy.route import RequestFacts, Route, Why
from router.policy.snapshot import Snapshot
from router.policy.worker_load import WorkerLoad
from tandem.core.errors import IncompatibleError, NoWorkerError
from tandem.core.identity import WorkerKey

LONGEST = 2000


def load(
    name: str, *, stepping: int = 0, active: int = 0, queued: int = 0, pages: int = 1000, layout: str = "a"
) -> WorkerLoad:
    kv_format = KvFormat(LayoutId("w", layout, num_layers=1, num_kv_heads=1, head_dim=8, page_size=16), "ucx")
    return WorkerLoad(WorkerKey(name, "1"), kv_format, 16, active, queued, pages, stepping, mixed_step_tokens=12)


def alone(snapshot: Snapshot, facts: RequestFacts) -> Route | None:
    """Where decode computes the prompt; `None`: it is handed off, or there is nobody."""
    try:
        route = choose(snapshot, facts)
    except (NoWorkerError, IncompatibleError):
        return None
    if route.prefill is not None:
        assert (route.max_local_tokens, route.why) == (0, Why.LOAD)
        return None
    assert (route.max_local_tokens, route.why) == (facts.num_prompt_tokens, Why.MIXED_POOL)
    return route


def chosen(snapshot: Snapshot, num_tokens: int, longest: int = LONGEST) -> str | None:
    route = alone(snapshot, RequestFacts(num_tokens, mixed_pool_tokens=longest))
    return route.decode.worker_id if route is not None else None


def test_an_idle_prefill_worker_gets_every_prompt() -> None:
    for num_tokens in (1, 16, 512, 2000):
        assert chosen(Snapshot.of([load("p0")], [load("d0")]), num_tokens) is None


@pytest.mark.parametrize(
    ("stepping", "queued", "decides"),
    [
        (0, 102, None),  # 1.2 times the work of 512 tokens is 614: as late as behind 102 others
        (0, 103, "d0"),
        (6, 716, None),  # half of each step is free: 2.4 times as slow
        (6, 717, "d0"),
        (12, 10**6, None),  # its steps are full
    ],
)
def test_decode_is_asked_where_the_prompt_is_ready_sooner(stepping: int, queued: int, decides: str | None) -> None:
    snapshot = Snapshot.of([load("p0", queued=queued)], [load("d0", stepping=stepping)])
    assert chosen(snapshot, 512) == decides


@pytest.mark.parametrize(
    ("num_tokens", "queued", "decides"),
    [
        (120, 879, None),  # ten steps, in each of which a prefill worker computes 100 tokens, are 1000
        (120, 881, "d0"),
        (1, 98, None),  # one step at least
        (1, 100, "d0"),
    ],
)
def test_steps_count_what_they_take_on_these_workers(num_tokens: int, queued: int, decides: str | None) -> None:
    prefill, decode = [load("p0", queued=queued)], [load("d0")]
    slow = Snapshot.of(prefill, decode, prefill_tokens_per_s=5000.0, mixed_step_s=0.02)
    assert chosen(slow, num_tokens) == decides
    quick = replace(slow, mixed_step_s=0.001)  # of less than the usual: that is what steps cost at least
    assert chosen(quick, num_tokens) == "d0"
    assert chosen(replace(quick, prefill=Snapshot.of([load("p0")], []).prefill), num_tokens) is None


def test_the_shortest_queue_of_prefill_counts() -> None:
    decode = [load("d0")]
    assert chosen(Snapshot.of([load("p0", queued=9000), load("p1", queued=9000)], decode), 512) == "d0"
    assert chosen(Snapshot.of([load("p0", queued=9000), load("p1")], decode), 512) is None


def test_what_decode_has_to_compute_already_counts() -> None:
    prefill = [load("p0", queued=512)]
    assert chosen(Snapshot.of(prefill, [load("d0", queued=512, stepping=1)]), 512) is None
    assert chosen(Snapshot.of(prefill, [load("d0", queued=512, stepping=1), load("d1", stepping=1)]), 512) == "d1"


def test_a_prompt_that_does_not_fit_is_handed_off() -> None:
    prefill = [load("p0", queued=9000)]
    assert chosen(Snapshot.of(prefill, [load("d0", pages=31)]), 512) is None
    assert chosen(Snapshot.of(prefill, [load("d0", pages=31), load("d1", pages=32, stepping=5)]), 512) == "d1"


def test_it_can_be_switched_off_and_needs_both_pools() -> None:
    prefill = [load("p0", queued=9000)]
    assert chosen(Snapshot.of(prefill, [load("d0")]), 512, 0) is None
    assert chosen(Snapshot.of([], [load("d0")]), 512) is None
    assert chosen(Snapshot.of(prefill, []), 512) is None


def test_handoffs_that_wait_at_prefill_take_nothing_from_decode_yet() -> None:
    snapshot = Snapshot.of([load("p0", queued=20_000, active=39)], [load("d0", active=39, stepping=0)])
    assert chosen(snapshot, 512) == "d0"


def test_long_prompts_are_handed_off() -> None:
    snapshot = Snapshot.of([load("p0", queued=100_000)], [load("d0")])
    assert chosen(snapshot, 2000) == "d0"
    assert chosen(snapshot, 2001) is None


def test_a_worker_that_does_not_want_to_is_not_asked() -> None:
    """As those on GPUs unless they are configured to."""
    unwilling = replace(load("d0"), mixed_step_tokens=0)
    assert chosen(Snapshot.of([load("p0", queued=9000)], [unwilling]), 512) is None


def test_only_workers_that_pair_count() -> None:
    """The others may serve other weights."""
    old, new = load("p0", queued=3000), load("p1", layout="b")
    assert chosen(Snapshot.of([old], [load("d0", stepping=1), load("d1", layout="b")]), 512) == "d0"
    assert chosen(Snapshot.of([old], [load("d1", layout="b")]), 512) is None
    assert chosen(Snapshot.of([old, new], [load("d0", stepping=1)]), 512) == "d0", "an idle one that pairs with nobody"
    assert chosen(Snapshot.of([old, new], [load("d0", stepping=1), load("d1", layout="b")]), 512) is None


def test_only_new_requests_that_are_not_urgent() -> None:
    """A later attempt goes as recovery says, and who is urgent does not wait for full steps."""
    snapshot = Snapshot.of([load("p0", queued=9000)], [load("d0")])
    facts = RequestFacts(512, mixed_pool_tokens=LONGEST)
    assert alone(snapshot, facts)
    assert alone(snapshot, replace(facts, priority=1))
    assert not alone(snapshot, replace(facts, priority=-1))
    assert not alone(snapshot, replace(facts, is_first_attempt=False))


loads = st.builds(
    lambda name, stepping, queued, pages, layout: load(
        f"w{name}", stepping=stepping, queued=queued, pages=pages, layout=layout
    ),
    st.integers(0, 9),
    st.integers(0, 20),
    st.integers(0, 5000),
    st.integers(-5, 500),
    st.sampled_from(["a", "b"]),
)
pools = st.lists(loads, max_size=5, unique_by=lambda w: w.key)


@given(pools, pools, st.integers(1, 4000), st.randoms())
def test_only_workers_with_room_and_never_against_a_shorter_queue(
    prefill: list[WorkerLoad], decode: list[WorkerLoad], num_tokens: int, random: object
) -> None:
    facts = RequestFacts(num_tokens, mixed_pool_tokens=LONGEST)
    route = alone(Snapshot.of(prefill, decode), facts)
    random.shuffle(prefill)  # type: ignore[attr-defined]
    random.shuffle(decode)  # type: ignore[attr-defined]
    assert alone(Snapshot.of(prefill, decode), facts) == route
    if route is None:
        return
    (worker,) = [w for w in decode if w.key == route.decode]
    assert worker.num_stepping < worker.mixed_step_tokens
    assert worker.num_available_pages * worker.page_size >= num_tokens
    assert num_tokens <= LONGEST
    assert min(w.num_queued_tokens for w in prefill if w.kv_format == worker.kv_format) > worker.num_queued_tokens
