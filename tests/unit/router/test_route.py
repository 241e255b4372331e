"""A route is a pure function of a snapshot, of what the request is and of what recovery wants."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.layout import KvFormat, LayoutId
from router.policy.choose import check_placeable, check_ready, choose, choose_prefill
from router.policy.route import RequestFacts, Route, Why, Wishes
from router.policy.snapshot import Snapshot
from router.policy.worker_load import WorkerLoad
from tandem.core.errors import IncompatibleError, NoWorkerError
from tandem.core.identity import WorkerKey
from tandem.core.step_times import PromptSteps


def load(name: str, *, active: int = 0, queued_tokens: int = 0, pages: int = 100, layout: str = "a") -> WorkerLoad:
    kv_format = KvFormat(LayoutId("w", layout, num_layers=1, num_kv_heads=1, head_dim=8, page_size=32), "ucx")
    return WorkerLoad(WorkerKey(name, "1"), kv_format, 32, active, queued_tokens, pages)


def test_prefill_goes_where_the_fewest_prompt_tokens_wait() -> None:
    snapshot = Snapshot.of(
        prefill=[load("p0", queued_tokens=900, active=1), load("p1", queued_tokens=100, active=5)], decode=[load("d0")]
    )
    assert choose(snapshot, RequestFacts(10)).prefill.worker_id == "p1"


def test_decode_goes_where_the_prompt_fits_then_to_the_smaller_batch_then_to_the_most_pages() -> None:
    prefill = [load("p0")]
    lacking = load("d0", active=0, pages=1)
    small, large = load("d1", active=2, pages=10), load("d2", active=5, pages=90)
    roomy = load("d3", active=2, pages=20)
    assert choose(Snapshot.of(prefill, [lacking, small, large]), RequestFacts(64)).decode.worker_id == "d1"
    assert choose(Snapshot.of(prefill, [lacking, small, large]), RequestFacts(32)).decode.worker_id == "d0"
    assert choose(Snapshot.of(prefill, [small, large, roomy]), RequestFacts(64)).decode.worker_id == "d3"


def test_where_the_prompt_fits_nowhere_it_waits_at_the_smallest_batch() -> None:
    snapshot = Snapshot.of([load("p0")], [load("d0", active=9, pages=5), load("d1", active=1, pages=0)])
    assert choose(snapshot, RequestFacts(10_000)).decode.worker_id == "d1"


def test_workers_that_failed_are_avoided_while_there_are_others() -> None:
    snapshot = Snapshot.of([load("p0")], [load("d0"), load("d1", active=50)])
    avoid = frozenset({WorkerKey("d0", "1"), WorkerKey("p0", "1")})
    route = choose(snapshot, RequestFacts(10), Wishes(avoid=avoid))
    assert (route.prefill.worker_id, route.decode.worker_id) == ("p0", "d1")
    earlier = Wishes(avoid=frozenset({WorkerKey("d0", "old life")}))
    assert choose(snapshot, RequestFacts(10), earlier).decode.worker_id == "d0"


@pytest.mark.parametrize(("pool", "prefill", "decode"), [("prefill", [], [load("d0")]), ("decode", [load("p0")], [])])
def test_an_empty_pool_is_named(pool: str, prefill: list[WorkerLoad], decode: list[WorkerLoad]) -> None:
    with pytest.raises(NoWorkerError, match=f"no {pool} worker"):
        choose(Snapshot.of(prefill, decode), RequestFacts(10))


def test_only_equal_layouts_pair() -> None:
    prefill = [load("p0", layout="a", queued_tokens=9999), load("p1", layout="b")]
    decode = [load("d0", layout="c"), load("d1", layout="a", active=50)]
    route = choose(Snapshot.of(prefill, decode), RequestFacts(10))
    assert (route.prefill.worker_id, route.decode.worker_id) == ("p0", "d1")
    with pytest.raises(IncompatibleError):
        choose(Snapshot.of(prefill[1:], decode), RequestFacts(10))


loads = st.builds(
    lambda n, a, q, p, y: load(f"w{n}", active=a, queued_tokens=q, pages=p, layout=y),
    st.integers(0, 9),
    st.integers(0, 9),
    st.integers(0, 999),
    st.integers(-5, 50),
    st.sampled_from(["a", "b"]),
)
pools = st.lists(loads, min_size=1, max_size=5, unique_by=lambda w: w.key)


@pytest.mark.long
@given(pools, pools, st.integers(1, 2000), st.randoms())
def test_a_route_pairs_and_does_not_depend_on_the_order_of_the_snapshot(
    prefill: list[WorkerLoad], decode: list[WorkerLoad], tokens: int, random: object
) -> None:
    if not {w.kv_format for w in prefill} & {w.kv_format for w in decode}:
        return
    route = choose(Snapshot.of(prefill, decode), RequestFacts(tokens))
    (p,) = (w for w in prefill if w.key == route.prefill)
    (d,) = (w for w in decode if w.key == route.decode)
    assert p.kv_format == d.kv_format
    random.shuffle(prefill)  # type: ignore[attr-defined]
    random.shuffle(decode)  # type: ignore[attr-defined]
    assert choose(Snapshot.of(prefill, decode), RequestFacts(tokens)) == route


# -- wishes of later attempts


def key(name: str) -> WorkerKey:
    return WorkerKey(name, "1")


BUSY_PREFILLS = [load("p0", queued_tokens=900), load("p1")]
BUSY_DECODES = [load("d0", active=50), load("d1"), load("d2", layout="b")]
BUSY_PAIR = Snapshot.of(BUSY_PREFILLS, BUSY_DECODES)


def test_who_holds_pages_of_the_request_is_taken_however_busy() -> None:
    assert choose(BUSY_PAIR, RequestFacts(10), Wishes(prefill=key("p0"))) == Route(key("p0"), key("d1"), 0, Why.KEPT)
    assert choose(BUSY_PAIR, RequestFacts(10), Wishes(decode=key("d0"))) == Route(key("p1"), key("d0"), 0, Why.KEPT)
    assert choose(BUSY_PAIR, RequestFacts(10), Wishes(key("p9"), key("d2"))) == Route(key("p1"), key("d1"), 0, Why.LOAD)


def test_a_wish_for_a_prefill_worker_finds_it_a_decode_worker_that_pairs() -> None:
    snapshot = Snapshot.of([load("p0", layout="b"), load("p1")], [load("d0", layout="b", active=50), load("d1")])
    assert choose(snapshot, RequestFacts(10), Wishes(prefill=key("p0"))) == Route(key("p0"), key("d0"), 0, Why.KEPT)


def test_decode_alone_where_it_still_is_and_else_a_pair() -> None:
    wishes = Wishes(decode=key("d0"), max_local_tokens=512, exclude=frozenset({key("p1")}))
    assert choose(BUSY_PAIR, RequestFacts(10), wishes) == Route(None, key("d0"), 512, Why.KEPT)
    assert choose(Snapshot.of([], BUSY_DECODES), RequestFacts(10), wishes) == Route(None, key("d0"), 512, Why.KEPT)
    route = choose(Snapshot.of(BUSY_PREFILLS, BUSY_DECODES[1:]), RequestFacts(10), wishes)
    assert route == Route(key("p0"), key("d1"), 0, Why.LOAD)


def test_who_is_gone_is_never_taken() -> None:
    exclude = frozenset({key("p0"), key("p1")})
    with pytest.raises(NoWorkerError, match="no prefill worker"):
        choose(BUSY_PAIR, RequestFacts(10), Wishes(exclude=exclude))
    with pytest.raises(NoWorkerError, match="no prefill worker"):
        choose_prefill(BUSY_PAIR, RequestFacts(10), key("d0"), BUSY_DECODES[0].kv_format, Wishes(exclude=exclude))


def test_a_prefill_worker_for_a_grant() -> None:
    kv_format = BUSY_DECODES[0].kv_format
    assert choose_prefill(BUSY_PAIR, RequestFacts(10), key("d0"), kv_format) == key("p1")
    avoid = Wishes(avoid=frozenset({key("p1")}))
    assert choose_prefill(BUSY_PAIR, RequestFacts(10), key("d0"), kv_format, avoid) == key("p0")
    with pytest.raises(IncompatibleError, match=r"p0/1 has 'a', d2/1 has 'b'"):
        choose_prefill(BUSY_PAIR, RequestFacts(10), key("d2"), BUSY_DECODES[2].kv_format)


def test_a_cluster_is_ready_where_two_pair_and_requests_may_come_before_that_where_workers_will() -> None:
    """Without a prompt there is nothing that the mixed pool could compute."""
    ready = Snapshot.of([load("p0", queued_tokens=900)], [replace(load("d0"), prompt_steps=PromptSteps(12))])
    check_ready(ready)
    check_placeable(ready)
    coming = Snapshot.of([], [load("d0")], is_prefill_coming=True)
    check_placeable(coming)
    empty = Snapshot.of([], [])
    for check, snapshot in ((check_ready, coming), (check_ready, empty), (check_placeable, empty)):
        with pytest.raises(NoWorkerError, match="no prefill worker"):
            check(snapshot)
    unpaired = Snapshot.of([load("p0")], [load("d0", layout="b")], is_decode_coming=True)
    check_placeable(unpaired)
    with pytest.raises(IncompatibleError):
        check_ready(unpaired)


def test_workers_that_do_not_pair_are_named_with_what_differs() -> None:
    with pytest.raises(IncompatibleError, match=r"dtype: p0/1 has 'a', d0/1 has 'b'") as error:
        choose(Snapshot.of([load("p0")], [load("d0", layout="b")]), RequestFacts(10))
    assert "transport" not in error.value.message


def test_a_prompt_that_is_pooled_goes_to_the_least_loaded_prefill_worker_of_any_format() -> None:
    facts, idle = RequestFacts(10, pools=True), load("p1", layout="b")
    snapshot = Snapshot.of([load("p0", queued_tokens=9), idle], [])
    assert choose(snapshot, facts) == Route(idle.key, None, 0, Why.LOAD)
    assert choose(snapshot, facts, Wishes(avoid=frozenset({idle.key}))).prefill == WorkerKey("p0", "1")
    assert choose(snapshot, facts, Wishes(exclude=frozenset({idle.key}))).prefill == WorkerKey("p0", "1")
    alone = Snapshot.of([idle], [])
    assert choose(alone, facts, Wishes(avoid=frozenset({idle.key}))).prefill == idle.key
    with pytest.raises(NoWorkerError, match="no prefill worker is ready"):
        choose(alone, facts, Wishes(exclude=frozenset({idle.key})))


def test_a_prompt_that_is_pooled_waits_for_a_prefill_worker_alone() -> None:
    check_ready(Snapshot.of([load("p0")], []), pools=True)
    check_placeable(Snapshot.of([], [], is_prefill_coming=True), pools=True)
    assert Snapshot.of([load("p0")], []).may_get_better(pools=True)
    with pytest.raises(NoWorkerError, match="no prefill worker is ready"):
        check_placeable(Snapshot.of([], [load("d0")], is_decode_coming=True), pools=True)


@pytest.mark.parametrize(
    ("prefill", "decode", "is_prefill_coming", "is_decode_coming", "hope"),
    [
        ([], [], False, False, False),
        ([], [load("d0")], False, True, False),
        ([], [load("d0")], True, False, True),
        ([load("p0")], [], False, True, True),
        ([], [], True, True, True),
        ([], [], True, False, False),
        ([load("p0")], [load("d0", layout="b")], False, False, False),
        ([load("p0")], [load("d0", layout="b")], False, True, True),
    ],
)
def test_waiting_makes_sense_where_the_membership_says_so(
    prefill: list[WorkerLoad], decode: list[WorkerLoad], is_prefill_coming: bool, is_decode_coming: bool, hope: bool
) -> None:
    snapshot = Snapshot.of(prefill, decode, is_prefill_coming=is_prefill_coming, is_decode_coming=is_decode_coming)
    assert snapshot.may_get_better() is hope
