"""Placement is a pure function of a snapshot."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.layout import KvFormat, LayoutId
from router.policy.placement import Placement, Snapshot, Wishes, WorkerLoad, place, place_prefill
from tandem.core.errors import IncompatibleError, NoWorkerError
from tandem.core.identity import WorkerKey


def load(name: str, *, active: int = 0, queued_tokens: int = 0, pages: int = 100, layout: str = "a") -> WorkerLoad:
    kv_format = KvFormat(LayoutId("w", layout, num_layers=1, num_kv_heads=1, head_dim=8, page_size=32), "ucx")
    return WorkerLoad(WorkerKey(name, "1"), kv_format, 32, active, queued_tokens, pages)


def test_prefill_goes_where_the_fewest_prompt_tokens_wait() -> None:
    snapshot = Snapshot(
        prefill=[load("p0", queued_tokens=900, active=1), load("p1", queued_tokens=100, active=5)], decode=[load("d0")]
    )
    assert place(snapshot, 10).prefill.worker_id == "p1"


def test_decode_goes_where_the_prompt_fits_then_to_the_smaller_batch_then_to_the_most_pages() -> None:
    prefill = [load("p0")]
    lacking = load("d0", active=0, pages=1)
    small, large = load("d1", active=2, pages=10), load("d2", active=5, pages=90)
    roomy = load("d3", active=2, pages=20)
    assert place(Snapshot(prefill, [lacking, small, large]), 64).decode.worker_id == "d1"
    assert place(Snapshot(prefill, [lacking, small, large]), 32).decode.worker_id == "d0"
    assert place(Snapshot(prefill, [small, large, roomy]), 64).decode.worker_id == "d3"


def test_where_the_prompt_fits_nowhere_it_waits_at_the_smallest_batch() -> None:
    snapshot = Snapshot([load("p0")], [load("d0", active=9, pages=5), load("d1", active=1, pages=0)])
    assert place(snapshot, 10_000).decode.worker_id == "d1"


def test_workers_that_failed_are_avoided_while_there_are_others() -> None:
    snapshot = Snapshot([load("p0")], [load("d0"), load("d1", active=50)])
    avoid = frozenset({WorkerKey("d0", "1"), WorkerKey("p0", "1")})
    placement = place(snapshot, 10, Wishes(avoid=avoid))
    assert (placement.prefill.worker_id, placement.decode.worker_id) == ("p0", "d1")
    assert place(snapshot, 10, Wishes(avoid=frozenset({WorkerKey("d0", "old life")}))).decode.worker_id == "d0"


@pytest.mark.parametrize(("pool", "prefill", "decode"), [("prefill", [], [load("d0")]), ("decode", [load("p0")], [])])
def test_an_empty_pool_is_named(pool: str, prefill: list[WorkerLoad], decode: list[WorkerLoad]) -> None:
    with pytest.raises(NoWorkerError, match=f"no {pool} worker"):
        place(Snapshot(prefill, decode), 10)


def test_only_equal_layouts_pair() -> None:
    prefill = [load("p0", layout="a", queued_tokens=9999), load("p1", layout="b")]
    decode = [load("d0", layout="c"), load("d1", layout="a", active=50)]
    placement = place(Snapshot(prefill, decode), 10)
    assert (placement.prefill.worker_id, placement.decode.worker_id) == ("p0", "d1")
    with pytest.raises(IncompatibleError):
        place(Snapshot(prefill[1:], decode), 10)


loads = st.builds(
    lambda n, a, q, p, y: load(f"w{n}", active=a, queued_tokens=q, pages=p, layout=y),
    st.integers(0, 9),
    st.integers(0, 9),
    st.integers(0, 999),
    st.integers(-5, 50),
    st.sampled_from(["a", "b"]),
)
pools = st.lists(loads, min_size=1, max_size=5, unique_by=lambda w: w.key)


@given(pools, pools, st.integers(1, 2000), st.randoms())
def test_a_placement_pairs_and_does_not_depend_on_the_order_of_the_snapshot(
    prefill: list[WorkerLoad], decode: list[WorkerLoad], tokens: int, random: object
) -> None:
    if not {w.kv_format for w in prefill} & {w.kv_format for w in decode}:
        return
    placement = place(Snapshot(prefill, decode), tokens)
    (p,) = (w for w in prefill if w.key == placement.prefill)
    (d,) = (w for w in decode if w.key == placement.decode)
    assert p.kv_format == d.kv_format
    random.shuffle(prefill)  # type: ignore[attr-defined]
    random.shuffle(decode)  # type: ignore[attr-defined]
    assert place(Snapshot(prefill, decode), tokens) == placement


# -- wishes of later attempts


def key(name: str) -> WorkerKey:
    return WorkerKey(name, "1")


BUSY_PAIR = Snapshot(
    [load("p0", queued_tokens=900), load("p1")], [load("d0", active=50), load("d1"), load("d2", layout="b")]
)


def test_who_holds_pages_of_the_request_is_taken_however_busy() -> None:
    assert place(BUSY_PAIR, 10, Wishes(prefill=key("p0"))) == Placement(key("p0"), key("d1"))
    assert place(BUSY_PAIR, 10, Wishes(decode=key("d0"))) == Placement(key("p1"), key("d0"))
    assert place(BUSY_PAIR, 10, Wishes(prefill=key("p9"), decode=key("d2"))) == Placement(key("p1"), key("d1"))


def test_a_wish_for_a_prefill_worker_finds_it_a_decode_worker_that_pairs() -> None:
    snapshot = Snapshot([load("p0", layout="b"), load("p1")], [load("d0", layout="b", active=50), load("d1")])
    assert place(snapshot, 10, Wishes(prefill=key("p0"))) == Placement(key("p0"), key("d0"))


def test_decode_alone_where_it_still_is_and_else_a_pair() -> None:
    wishes = Wishes(decode=key("d0"), alone=True, exclude=frozenset({key("p1")}))
    assert place(BUSY_PAIR, 10, wishes) == Placement(None, key("d0"))
    assert place(Snapshot([], BUSY_PAIR.decode), 10, wishes) == Placement(None, key("d0"))
    assert place(Snapshot(BUSY_PAIR.prefill, BUSY_PAIR.decode[1:]), 10, wishes) == Placement(key("p0"), key("d1"))


def test_who_is_gone_is_never_taken() -> None:
    exclude = frozenset({key("p0"), key("p1")})
    with pytest.raises(NoWorkerError, match="no prefill worker"):
        place(BUSY_PAIR, 10, Wishes(exclude=exclude))
    with pytest.raises(NoWorkerError, match="no prefill worker"):
        place_prefill(BUSY_PAIR, key("d0"), BUSY_PAIR.decode[0].kv_format, Wishes(exclude=exclude))


def test_a_prefill_worker_for_a_grant() -> None:
    kv_format = BUSY_PAIR.decode[0].kv_format
    assert place_prefill(BUSY_PAIR, key("d0"), kv_format) == Placement(key("p1"), key("d0"))
    avoid = Wishes(avoid=frozenset({key("p1")}))
    assert place_prefill(BUSY_PAIR, key("d0"), kv_format, avoid) == Placement(key("p0"), key("d0"))
    with pytest.raises(IncompatibleError, match=r"p0/1 has 'a', d2/1 has 'b'"):
        place_prefill(BUSY_PAIR, key("d2"), BUSY_PAIR.decode[2].kv_format)


def test_workers_that_do_not_pair_are_named_with_what_differs() -> None:
    with pytest.raises(IncompatibleError, match=r"dtype: p0/1 has 'a', d0/1 has 'b'") as error:
        place(Snapshot([load("p0")], [load("d0", layout="b")]), 10)
    assert "transport" not in error.value.message


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
    assert Snapshot(prefill, decode, is_prefill_coming, is_decode_coming).may_get_better is hope
