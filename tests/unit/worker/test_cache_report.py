"""What routers are told of a prefix cache is what the pool holds."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.core.pages import CacheChange, PagePool
from tandem.worker import cache_report
from tandem.worker.cache_report import CacheNews, CacheReport


def key(number: int) -> bytes:
    return number.to_bytes(8) + bytes(24)


def told(known: set[bytes], news: list[CacheNews]) -> set[bytes]:
    """What a router that knew so much knows now."""
    for piece in news:
        known = (set() if piece.is_first else known).union(piece.came).difference(piece.went)
    return known


@pytest.mark.long
@given(st.lists(st.tuples(st.sampled_from(["publish", "evict", "discard", "quarantine", "tell"]), st.integers(0, 7))))
def test_a_router_knows_what_the_pool_holds(changes: list[tuple[str, int]]) -> None:
    pool, report, early = PagePool(4, 16), CacheReport(), set[bytes]()
    pool.note_changes()
    for what, number in changes:
        if what == "publish" and pool.match([key(number)]) == 0 and (pages := pool.allocate(1)) is not None:
            pool.publish(pages[0], key(number))
            pool.release(pages)
        elif what == "evict" and (pages := pool.allocate(number % 5)) is not None:
            pool.release(pages)
        elif what == "discard":
            pool.discard([key(number)])
        elif what == "quarantine" and (pages := pool.acquire([key(number)])):
            pool.quarantine(pages)
            pool.lift(pages)
        elif what == "tell":
            if (change := pool.take_changes()) is not None:
                report.note(change)
            early = told(early, report.news())
    if (change := pool.take_changes()) is not None:
        report.note(change)
    early = told(early, report.news())
    late = told({b"of an earlier stream"}, report.everything())
    assert early == late == {key(number)[:8] for number in range(8) if pool.match([key(number)])}
    assert report.news() == []


def test_changes_are_noted_for_who_takes_them_only() -> None:
    pool = PagePool(2, 16)
    (page,) = pool.allocate(1) or []
    pool.publish(page, key(1))
    assert pool.take_changes() is None
    pool.note_changes()
    change = pool.take_changes()
    assert change is not None
    assert change.came == (key(1),), "what was there before is told too"
    assert pool.take_changes() is None


def test_messages_are_of_a_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_report, "_MOST", 3)
    pool, report = PagePool(8, 16), CacheReport()
    pool.note_changes()
    for number, page in enumerate(pool.allocate(8) or []):
        pool.publish(page, key(number))
    change = pool.take_changes()
    assert change is not None
    report.note(change)
    assert [[len(piece.came) for piece in report.news()] for _ in range(4)] == [[3], [3], [2], []]
    assert [(len(piece.came), piece.is_first) for piece in report.everything()] == [(3, True), (3, False), (2, False)]
    report.note_tiers(CacheChange(came=tuple(map(key, range(7)))), CacheChange())
    assert [[len(piece.tier_came) for piece in report.news()] for _ in range(4)] == [[3], [3], [1], []]
    assert [len(piece.tier_came) for piece in report.everything()] == [0, 0, 0, 3, 3, 1]
    report.note_tiers(CacheChange(came=(key(9),), went=(key(1),)), CacheChange())
    assert report.news() == [CacheNews(tier_came=(key(9)[:8],), tier_went=(key(1)[:8],))]
    report.note_tiers(CacheChange(), CacheChange(came=(key(9), key(2)), went=(key(1),)))
    assert report.news() == [CacheNews(near_came=(key(9)[:8], key(2)[:8]), near_went=(key(1)[:8],))]
    assert report.everything()[-1] == CacheNews(near_came=(key(9)[:8], key(2)[:8]))
    report.note(CacheChange(came=tuple(map(key, range(20, 22))), went=tuple(map(key, range(10)))))
    while news := report.news():
        assert sum(len(piece.came) + len(piece.went) for piece in news) <= 2 * 3
    assert CacheReport().everything() == [CacheNews(is_first=True)]


_STEPS = st.lists(
    st.tuples(st.sampled_from(["pool", "tiers", "near"]), st.booleans(), st.lists(st.integers(0, 30), max_size=9))
    | st.sampled_from(["tell", "join"]),
    max_size=30,
)


@pytest.mark.long
@given(_STEPS)
def test_whenever_a_router_joins_it_knows_what_all_know(steps: list[Any]) -> None:
    """However much is still to be told."""
    with patch.object(cache_report, "_MOST", 3):
        report, routers = CacheReport(), list[dict[str, set[bytes]]]()
        held: dict[str, set[int]] = {where: set() for where in _PREFIXES}

        def tell() -> bool:
            news = report.news()
            routers[:] = [heard(router, news) for router in routers]
            return bool(news)

        for step in steps:
            if step == "tell":
                tell()
            elif step == "join":
                tell()
                routers.append(heard({where: set() for where in _PREFIXES}, report.everything()))
            else:
                where, is_held, numbers = step
                keys = tuple(map(key, numbers))
                change = CacheChange(came=keys) if is_held else CacheChange(went=keys)
                if where == "pool":
                    report.note(change)
                else:
                    report.note_tiers(*((change, CacheChange()) if where == "tiers" else (CacheChange(), change)))
                (held[where].update if is_held else held[where].difference_update)(numbers)
        while tell():
            pass
        expected = {where: {key(number)[:8] for number in numbers} for where, numbers in held.items()}
        assert all(router == expected for router in routers)


#: Of an event's fields.
_PREFIXES = {"pool": "", "tiers": "tier_", "near": "near_"}


def heard(router: dict[str, set[bytes]], news: list[CacheNews]) -> dict[str, set[bytes]]:
    for piece in news:
        if piece.is_first:
            router = {where: set() for where in _PREFIXES}
        router = {
            where: router[where].union(getattr(piece, f"{prefix}came")).difference(getattr(piece, f"{prefix}went"))
            for where, prefix in _PREFIXES.items()
        }
    return router
