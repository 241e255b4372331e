"""Which prompts decode computes by itself is a pure function of a snapshot."""

from __future__ import annotations

import math
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
from tandem.core.step_times import NO_PROMPTS, PromptSteps

LONGEST = 2000
STEPS = PromptSteps(64)


def load(
    name: str,
    *,
    stepping: int = 0,
    active: int = 0,
    queued: int = 0,
    pages: int = 1000,
    layout: str = "a",
    steps: PromptSteps = STEPS,
    seqs: int = 0,
) -> WorkerLoad:
    kv_format = KvFormat(LayoutId("w", layout, num_layers=1, num_kv_heads=1, head_dim=8, page_size=16), "ucx")
    return WorkerLoad(WorkerKey(name, "1"), kv_format, 16, max(active, stepping), queued, pages, stepping, steps, seqs)


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


def chosen(snapshot: Snapshot, num_tokens: int, longest: float = LONGEST) -> str | None:
    route = alone(snapshot, RequestFacts(num_tokens, mixed_pool_tokens=longest))
    return route.decode.worker_id if route is not None else None


def test_an_idle_prefill_worker_gets_every_prompt() -> None:
    for num_tokens in (1, 16, 512, 2000):
        assert chosen(Snapshot.of([load("p0")], [load("d0")]), num_tokens) is None


def test_where_nothing_is_known_of_its_steps_decode_is_asked_for_little_more_than_prefill_takes() -> None:
    """1.2 times the work of 512 tokens is 614: as much as behind 51 others for it, and for 51 behind it."""
    assert [chosen(Snapshot.of([load("p0", queued=queued)], [load("d0")]), 512) for queued in (51, 52)] == [None, "d0"]


@pytest.mark.parametrize(
    ("num_tokens", "queued", "decides"),
    [
        (120, 439, None),  # two steps of 40 ms and 120 tokens of a millisecond: meanwhile prefill computes 1,000
        (120, 441, "d0"),
        (1, 101, None),  # one step at least
        (1, 103, "d0"),
    ],
)
def test_steps_count_what_they_take_on_these_workers(num_tokens: int, queued: int, decides: str | None) -> None:
    decode = load("d0", active=1, steps=PromptSteps(64, 0.04, 0.001))
    snapshot = Snapshot.of([load("p0", queued=queued)], [decode], prefill_tokens_per_s=5000.0)
    assert chosen(snapshot, num_tokens) == decides
    assert chosen(replace(snapshot, prefill=Snapshot.of([load("p0")], []).prefill), num_tokens) is None


def decided(
    steps: PromptSteps,
    *,
    num_tokens: int = 512,
    queued: int = 0,
    active: int = 0,
    known: float = 512,
    by: float = math.inf,
) -> str | None:
    """With a prefill worker of 1,000 tokens a second, and a decode worker of such steps."""
    prefill, decode = [load("p0", queued=queued)], [load("d0", active=active, steps=steps)]
    snapshot = Snapshot.of(prefill, decode, prefill_tokens_per_s=1000.0, num_prefill_tokens_known=known)
    facts = RequestFacts(num_tokens, mixed_pool_tokens=math.inf, first_token_in_s=by)
    route = alone(snapshot, facts)
    return route.decode.worker_id if route is not None else None


def test_a_prompt_that_is_ready_as_soon_needs_no_handoff_where_nobody_is() -> None:
    """As soon is less than 1.2 times the time."""
    assert decided(PromptSteps(512, 0.1, 0.001)) == "d0"
    assert decided(PromptSteps(512, 0.11, 0.001)) is None
    assert decided(PromptSteps(64, 0.02, 0.001)) is None, "eight steps"
    assert decided(PromptSteps(512, 0.1, 0.001), active=1) is None
    assert decided(PromptSteps(512, 0.11, 0.001), queued=56) == "d0", "56 in front, and for 56 behind it"
    assert decided(PromptSteps(512, 0.1, 0.001), active=4, queued=51) is None
    assert decided(PromptSteps(512, 0.1, 0.001), by=0.55) is None, "late at decode alone"
    assert decided(PromptSteps(512, 0.1, 0.001), by=0.62) == "d0"


def test_a_slow_decode_worker_is_found_out_with_little() -> None:
    """Prefill's speed has to be known for such prompts, and decode's, or the prompt is short."""
    quick, unknown = PromptSteps(512, 0.0, 0.001), PromptSteps(512)
    for known, decides in ((0.0, None), (127.0, None), (128.0, "d0")):
        assert decided(quick, known=known) == decides
    assert decided(unknown, num_tokens=2000, known=2000) == "d0"
    assert decided(unknown, num_tokens=2001, known=2000) is None
    assert decided(quick, num_tokens=2001, known=2000) == "d0"


def test_prompts_of_any_length_are_computed_beside_tokens() -> None:
    decode = load("d0", steps=PromptSteps(64, 0.04, 0.001))
    snapshot = Snapshot.of([load("p0", queued=200_000)], [decode], prefill_tokens_per_s=5000.0)
    for num_tokens in (1, 2_001, 16_000):
        assert chosen(snapshot, num_tokens, math.inf) == "d0"


def test_those_who_generate_count_and_those_who_would_wait_behind_it_at_prefill() -> None:
    """Both ways a prompt delays others by its own computation: the way is taken of the least sum."""
    steps = PromptSteps(512, 0.0, 0.001)
    for num_rows, queued, decides in ((0, 99, None), (0, 101, "d0"), (3, 1599, None), (3, 1601, "d0")):
        prefill, decode = load("p0", queued=queued), load("d0", active=4, stepping=num_rows, steps=steps)
        snapshot = Snapshot.of([prefill], [decode], prefill_tokens_per_s=1000.0)
        assert chosen(snapshot, 1000) == decides, (num_rows, queued)


def test_where_one_way_keeps_the_target_of_the_first_token_it_is_taken() -> None:
    """Else its own delay and that of others decide."""
    decode = load("d0", stepping=9, steps=PromptSteps(512, 0.0, 0.001))
    snapshot = Snapshot.of([load("p0", queued=4000)], [decode], prefill_tokens_per_s=1000.0)
    for wanted_s, decides in ((0.5, None), (1.1, None), (1.3, "d0"), (4.9, "d0"), (5.1, None), (math.inf, None)):
        route = choose(snapshot, RequestFacts(1000, mixed_pool_tokens=LONGEST, first_token_in_s=wanted_s))
        assert (route.decode.worker_id if route.prefill is None and route.decode else None) == decides, wanted_s


def test_targets_that_leave_no_time_and_full_batches_keep_prompts_away_and_say_so() -> None:
    prefill = [load("p0", queued=90_000)]
    busy, full = load("d0", steps=PromptSteps(0, 0.05, 0.001)), load("d1", stepping=4, seqs=4)
    for worker, why in ((busy, "targets"), (full, "places")):
        snapshot = Snapshot.of(prefill, [worker])
        assert chosen(snapshot, 512) is None
        route = choose(snapshot, RequestFacts(512, mixed_pool_tokens=LONGEST))
        (shown,) = [candidate for candidate in route.weighed if candidate.worker == worker.key]
        assert shown.cost_alone is None
        assert why in shown.why_not_alone
    assert chosen(Snapshot.of(prefill, [replace(full, num_stepping=3)]), 512) == "d1"


def test_the_shortest_queue_of_prefill_counts() -> None:
    decode = [load("d0")]
    assert chosen(Snapshot.of([load("p0", queued=9000), load("p1", queued=9000)], decode), 512) == "d0"
    assert chosen(Snapshot.of([load("p0", queued=9000), load("p1")], decode), 512) is None


def test_what_decode_has_to_compute_already_counts() -> None:
    prefill = [load("p0", queued=512)]
    assert chosen(Snapshot.of(prefill, [load("d0", queued=512)]), 512) is None
    assert chosen(Snapshot.of(prefill, [load("d0", queued=512), load("d1")]), 512) == "d1"


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
    """As those of an earlier version, which do not say what their steps take."""
    unwilling = load("d0", steps=NO_PROMPTS)
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


@pytest.mark.long
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
    assert worker.prompt_steps.num_tokens
    assert worker.num_available_pages * worker.page_size >= num_tokens
    assert num_tokens <= LONGEST
    able = [w for w in prefill if w.kv_format == worker.kv_format]
    assert 2 * min(w.num_queued_tokens for w in able) > worker.num_queued_tokens
