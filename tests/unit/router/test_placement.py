"""Placement is a pure function of a snapshot."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.placement import Snapshot, WorkerLoad, place
from router.worker_key import WorkerKey
from tandem.core.errors import IncompatibleError, NoWorkerError


def load(name: str, *, active: int = 0, queued_tokens: int = 0, pages: int = 100, layout: bytes = b"a") -> WorkerLoad:
    return WorkerLoad(WorkerKey(name, "1"), layout, 32, active, queued_tokens, pages)


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
    avoid = {WorkerKey("d0", "1"), WorkerKey("p0", "1")}
    placement = place(snapshot, 10, avoid)
    assert (placement.prefill.worker_id, placement.decode.worker_id) == ("p0", "d1")
    assert place(snapshot, 10, {WorkerKey("d0", "old life")}).decode.worker_id == "d0"


@pytest.mark.parametrize(("pool", "prefill", "decode"), [("prefill", [], [load("d0")]), ("decode", [load("p0")], [])])
def test_an_empty_pool_is_named(pool: str, prefill: list[WorkerLoad], decode: list[WorkerLoad]) -> None:
    with pytest.raises(NoWorkerError, match=f"no {pool} worker"):
        place(Snapshot(prefill, decode), 10)


def test_only_equal_layouts_pair() -> None:
    prefill = [load("p0", layout=b"a", queued_tokens=9999), load("p1", layout=b"b")]
    decode = [load("d0", layout=b"c"), load("d1", layout=b"a", active=50)]
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
    st.sampled_from([b"a", b"b"]),
)
pools = st.lists(loads, min_size=1, max_size=5, unique_by=lambda w: w.key)


@given(pools, pools, st.integers(1, 2000), st.randoms())
def test_a_placement_pairs_and_does_not_depend_on_the_order_of_the_snapshot(
    prefill: list[WorkerLoad], decode: list[WorkerLoad], tokens: int, random: object
) -> None:
    if not {w.layout for w in prefill} & {w.layout for w in decode}:
        return
    placement = place(Snapshot(prefill, decode), tokens)
    (p,) = (w for w in prefill if w.key == placement.prefill)
    (d,) = (w for w in decode if w.key == placement.decode)
    assert p.layout == d.layout
    random.shuffle(prefill)  # type: ignore[attr-defined]
    random.shuffle(decode)  # type: ignore[attr-defined]
    assert place(Snapshot(prefill, decode), tokens) == placement
