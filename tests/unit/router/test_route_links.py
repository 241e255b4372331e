"""What is known of the way between two workers counts where a pair is chosen."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.layout import KvFormat, LayoutId
from router.policy.choose import choose, choose_prefill
from router.policy.costs import has_room
from router.policy.pool import ALONE, Share
from router.policy.route import RequestFacts, Route, Why, Wishes
from router.policy.snapshot import Link, Snapshot
from router.policy.worker_load import WorkerLoad
from tandem.core.identity import WorkerKey

FORMAT = KvFormat(LayoutId("w", "float32", num_layers=4, num_kv_heads=2, head_dim=64, page_size=16), "ucx")
TOKEN_BYTES = 4 * 2 * 2 * 64 * 4
FACTS = RequestFacts(1000)
BROKEN = Link(is_broken=True)


def key(name: str) -> WorkerKey:
    return WorkerKey(name, "1")


def load(name: str, *, active: int = 0, queued: int = 0) -> WorkerLoad:
    return WorkerLoad(key(name), FORMAT, 16, active, queued, 1000)


def at(tokens_per_s: float) -> Link:
    """A way that takes the pages of so many tokens a second."""
    return Link(tokens_per_s * TOKEN_BYTES)


def pair(prefill: list[WorkerLoad], decode: list[WorkerLoad], links: dict[str, Link], **others: Any) -> str:
    """Who is chosen; ways by names as `p0 d0`. Prefill computes 1,000 tokens a second."""
    known = {(key(p), key(d)): link for names, link in links.items() for p, d in [names.split()]}
    snapshot = Snapshot.of(prefill, decode, links=known, prefill_tokens_per_s=1000.0)
    route = choose(snapshot, FACTS, **others)
    assert route.prefill is not None
    return f"{route.prefill.worker_id} {route.decode.worker_id}"


def test_the_bytes_of_a_token_are_those_of_its_pages() -> None:
    assert FORMAT.layout.token_bytes == TOKEN_BYTES


def test_a_broken_pair_is_chosen_only_where_there_is_no_other() -> None:
    prefill, decode = [load("p0"), load("p1", queued=9000)], [load("d0"), load("d1", active=9)]
    assert pair(prefill, decode, {"p1 d1": BROKEN}) == "p0 d0"
    assert pair(prefill, decode, {"p0 d0": BROKEN}) == "p0 d1", "who has no prompts in front of it"
    assert pair(prefill, decode, {"p0 d0": BROKEN, "p1 d0": BROKEN}) == "p0 d1"
    assert pair(prefill, decode, {f"{p} {d}": BROKEN for p in ("p0", "p1") for d in ("d0", "d1")}) == "p0 d0"
    assert pair(prefill[:1], decode[:1], {"p0 d0": BROKEN}) == "p0 d0"


def test_a_broken_pair_is_not_chosen_because_of_a_wish_either() -> None:
    prefill, decode = [load("p0"), load("p1", queued=9000)], [load("d0"), load("d1", active=9)]
    assert pair(prefill, decode, {"p1 d0": BROKEN}, wishes=Wishes(prefill=key("p1"))) == "p1 d1"
    assert pair(prefill, decode, {"p0 d1": BROKEN}, wishes=Wishes(decode=key("d1"))) == "p1 d1"
    assert pair(prefill, decode, {"p0 d0": BROKEN}, wishes=Wishes(avoid=frozenset({key("p1")}))) == "p0 d1"
    gone = Wishes(exclude=frozenset({key("d1"), key("p1")}))
    assert pair(prefill, decode, {"p0 d0": BROKEN}, wishes=gone) == "p0 d0"


def test_one_of_many_is_found_whose_way_works() -> None:
    """A host that is cut off has many idle workers: the least loaded of all, and none of them can be reached."""
    prefill = [load(f"p{n}", queued=n) for n in range(20)]
    decode = [load(f"d{n}", active=n) for n in range(20)]
    cut_off = {f"p{p} d{d}": BROKEN for p, d in itertools.product(range(20), range(12))}
    assert pair(prefill, decode, cut_off) == "p0 d12"
    everything = {f"p{p} d{d}": BROKEN for p, d in itertools.product(range(20), range(20)) if (p, d) != (19, 19)}
    assert pair(prefill, decode, everything) == "p19 d19"


def test_a_grant_is_filled_over_a_way_that_works() -> None:
    prefill = [load(f"p{n}", queued=n) for n in range(12)]
    links = {(key(f"p{n}"), key("d0")): BROKEN for n in range(11)}
    snapshot = Snapshot.of(prefill, [load("d0")], links=links)
    assert choose_prefill(snapshot, FACTS, key("d0"), FORMAT) == key("p11")
    assert choose_prefill(snapshot, FACTS, key("d1"), FORMAT) == key("p0")
    links[key("p11"), key("d0")] = BROKEN
    assert choose_prefill(snapshot, FACTS, key("d0"), FORMAT) == key("p0"), "there is no other"


def test_a_way_that_is_as_fast_as_prefill_computes_costs_nothing() -> None:
    """Pages leave while the rest computes."""
    prefill, decode = [load("p0"), load("p1", queued=1)], [load("d0"), load("d1", active=1)]
    assert pair(prefill, decode, {"p0 d0": at(1000)}) == "p0 d0"
    assert pair(prefill, decode, {"p0 d0": at(850)}) == "p0 d0", "hardly later: the batches matter more"


def test_a_slow_way_costs_what_its_pages_come_later() -> None:
    """1,000 tokens at 500 a second: one second longer than they are computed, in which others are, 1,000 tokens."""
    slow = {"p0 d0": at(500)}
    assert pair([load("p0"), load("p1", queued=999)], [load("d0")], slow) == "p1 d0"
    assert pair([load("p0"), load("p1", queued=1001)], [load("d0")], slow) == "p0 d0"
    assert pair([load("p0"), load("p1", queued=1001)], [load("d0"), load("d1", active=9)], slow) == "p0 d1"
    assert choose_prefill(
        Snapshot.of(
            [load("p0"), load("p1", queued=999)],
            [load("d0")],
            links={(key("p0"), key("d0")): at(500)},
            prefill_tokens_per_s=1000.0,
        ),
        FACTS,
        key("d0"),
        FORMAT,
    ) == key("p1")


def test_a_way_is_slow_only_for_pages_that_are_sent() -> None:
    """Where tokens see a window, it is its pages that travel, however long the prompt is."""

    def chosen(window: int, queued: int) -> str:
        seen = KvFormat(replace(FORMAT.layout, window=window), FORMAT.transport)
        prefill = [replace(load("p0"), kv_format=seen), replace(load("p1", queued=queued), kv_format=seen)]
        return pair(prefill, [replace(load("d0"), kv_format=seen)], {"p0 d0": at(500)})

    assert [chosen(window, queued=400) for window in (0, 900, 300)] == ["p1 d0", "p1 d0", "p0 d0"]
    assert chosen(300, queued=300) == "p1 d0", "320 tokens are computed while the first 160 of them are sent"


def test_of_a_mixed_model_pages_travel_as_far_as_each_kind_of_layer_sees() -> None:
    """One layer in four sees all 63 pages of the prompt, the others the last six: as many as 324 tokens have."""
    seen = KvFormat(replace(FORMAT.layout, num_layers=1, window=80, num_windowed=3), FORMAT.transport)
    assert seen.layout.token_bytes == TOKEN_BYTES
    assert seen.layout.num_sent_pages(1000) == 63 + 3 * 6

    def chosen(queued: int) -> str:
        prefill = [replace(load("p0"), kv_format=seen), replace(load("p1", queued=queued), kv_format=seen)]
        return pair(prefill, [replace(load("d0"), kv_format=seen)], {"p0 d0": at(250)})

    assert [chosen(queued) for queued in (250, 350)] == ["p1 d0", "p0 d0"], "296 ms longer than it is computed"
    decode = [replace(load("d0"), kv_format=seen, num_available_pages=num_pages) for num_pages in (80, 81)]
    assert [has_room(worker, FACTS) for worker in decode] == [False, True]


def test_who_holds_pages_is_taken_over_a_slow_way_too() -> None:
    prefill, decode = [load("p0"), load("p1")], [load("d0"), load("d1", active=5)]
    assert pair(prefill, decode, {"p1 d0": at(10)}, wishes=Wishes(prefill=key("p1"))) == "p1 d1"
    assert pair(prefill, decode[:1], {"p1 d0": at(10)}, wishes=Wishes(prefill=key("p1"))) == "p1 d0"


figures = st.lists(st.integers(0, 5), min_size=1, max_size=12)


@pytest.mark.long
@given(figures, figures, st.sampled_from([ALONE, Share(1, 2), Share(2, 4), Share(7, 8)]))
def test_ways_that_cost_nothing_change_nothing(queues: list[int], batches: list[int], share: Share) -> None:
    prefill = [load(f"p{n}", queued=20 * queued) for n, queued in enumerate(queues)]
    decode = [load(f"d{n}", active=active) for n, active in enumerate(batches)]
    known = {(key(f"p{p}"), key("d0")): at(5000) for p in range(len(queues))}
    found = choose(Snapshot.of(prefill, decode, share=share, links=known, prefill_tokens_per_s=1000.0), FACTS)
    assert found == choose(Snapshot.of(prefill, decode, share=share, prefill_tokens_per_s=1000.0), FACTS)
    assert found == Route(found.prefill, found.decode, 0, Why.LOAD)
