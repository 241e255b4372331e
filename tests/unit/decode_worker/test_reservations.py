"""Who gets pages for a handoff, and when: decided without a model, a clock or a wire."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decode_worker.reservations import RESERVED_SHARE, Granted, Reservation, ReservationQueue
from kvtransfer.protocol.messages import AttemptKey
from tandem.core.errors import OverloadedError
from tandem.core.pages import PagePool, page_keys
from tandem.core.sampling import SamplingParams
from tandem.worker.scheduler import BatchScheduler, SchedulerLimits
from tandem.worker.sequence import Sequence

PAGE = 4


def make_queue(num_pages: int = 40, *, seqs: int = 8, bound: int = 100) -> ReservationQueue:
    limits = SchedulerLimits(seqs, 32, 16, bound)
    return ReservationQueue(BatchScheduler(PagePool(num_pages, PAGE), limits, salt=b"m"), bound=bound)


def reservation(
    name: str, num_pages: int, *, arrival: int = 0, priority: int = 0, n: int = 1, tokens: list[int] | None = None
) -> Reservation:
    keys = tuple(page_keys(tokens, PAGE, b"m")) if tokens else ()
    num_tokens = len(tokens) if tokens else num_pages * PAGE
    return Reservation(AttemptKey(name, 1), priority, arrival, num_tokens, n, keys)


def push(queue: ReservationQueue, *reservations: Reservation) -> list[str]:
    """Queue them and return who is granted at once."""
    for one in reservations:
        queue.push(one)
    return names(queue.pump())


def names(granted: list[Granted]) -> list[str]:
    return [g.reservation.key.request_id for g in granted]


def give_back(queue: ReservationQueue, name: str) -> None:
    """The handoff ended without admission."""
    granted = queue.settle(AttemptKey(name, 1))
    assert granted is not None
    pool(queue).release(granted.pages)
    pool(queue).release(granted.cached)


def pool(queue: ReservationQueue) -> PagePool:
    return queue._pool


def run(queue: ReservationQueue, num: int, pages_each: int = 1) -> list[Sequence]:
    """Sequences that run already."""
    running = []
    for n in range(num):
        sequence = Sequence("run", 1, n, 0, n, [1] * PAGE, PAGE, SamplingParams(), num_computed=PAGE - 1)
        sequence.pages = pool(queue).allocate(pages_each) or []
        queue._scheduler.enter(sequence)
        running.append(sequence)
    return running


def test_reserved_pages_are_a_quarter_of_the_pool_at_most() -> None:
    queue = make_queue(40)
    asked = [reservation(f"r{n}", 4, arrival=n) for n in range(4)]
    assert push(queue, *asked) == ["r0", "r1"], "4 + 4 of 10; 12 would be more than a quarter"
    assert pool(queue).counts().reserved == 8
    give_back(queue, "r0")
    assert names(queue.pump()) == ["r2"]


def test_one_is_always_allowed_when_nothing_else_is_reserved() -> None:
    queue = make_queue(40)
    assert push(queue, reservation("large", 39), reservation("small", 1, arrival=1)) == ["large"]
    give_back(queue, "large")
    assert names(queue.pump()) == ["small"]


def test_the_head_is_not_overtaken() -> None:
    queue = make_queue(40)
    first, large, small = reservation("a", 8), reservation("large", 9, arrival=1), reservation("s", 1, arrival=2)
    assert push(queue, first, large, small) == ["a"]
    give_back(queue, "a")
    assert names(queue.pump()) == ["large", "s"]


def test_priority_goes_before_age() -> None:
    queue = make_queue(40)
    push(queue, reservation("blocker", 10))
    push(queue, reservation("old", 1, arrival=1), reservation("urgent", 1, arrival=2, priority=-1))
    assert [r.key.request_id for r in queue.waiting] == ["urgent", "old"]


def test_what_runs_keeps_a_page_each_to_grow_into() -> None:
    queue = make_queue(12, seqs=20)
    running = run(queue, 5)
    assert push(queue, reservation("a", 3)) == [], "7 pages are left, 5 of them for growth"
    pool(queue).release(queue._scheduler.remove(running[0]))
    assert names(queue.pump()) == ["a"], "8 pages are left, 4 of them for growth"


def test_nothing_new_while_a_preempted_one_waits() -> None:
    queue = make_queue(40)
    (sequence,) = run(queue, 1)
    pool(queue).release(queue._scheduler.remove(sequence))
    queue._scheduler.add(sequence)
    assert push(queue, reservation("a", 1)) == []
    queue._scheduler.remove(sequence)
    assert names(queue.pump()) == ["a"]


def test_places_in_the_batch_are_counted_with_all_choices_to_come() -> None:
    queue = make_queue(200, seqs=4)
    run(queue, 1)
    assert push(queue, reservation("two", 1, n=2), reservation("more", 1, arrival=1, n=2)) == ["two"]
    queue.settle(AttemptKey("two", 1))
    assert names(queue.pump()) == ["more"], "1 + 2 of 4; admitted ones would be counted as running"


def test_more_choices_than_places_may_run_alone() -> None:
    queue = make_queue(200, seqs=4)
    assert push(queue, reservation("wide", 1, n=9), reservation("next", 1, arrival=1)) == ["wide"]


def test_cached_pages_are_pinned_while_they_are_granted() -> None:
    queue = make_queue(8)
    tokens = list(range(PAGE * 3))
    pages = pool(queue).allocate(3) or []
    for page, key in zip(pages, page_keys(tokens, PAGE, b"m"), strict=True):
        pool(queue).publish(page, key)
    pool(queue).release(pages)
    queue.push(reservation("a", 3, tokens=tokens))
    (granted,) = queue.pump()
    assert list(granted.cached) == pages[:2], "the last page is always sent"
    assert len(granted.pages) == 1
    assert pool(queue).allocate(6) is None, "what is granted cannot be evicted"
    give_back(queue, "a")
    assert pool(queue).counts().used == pool(queue).counts().reserved == 0


def test_a_refused_head_leaves_cached_pages_where_they_were() -> None:
    queue = make_queue(8)
    tokens = list(range(PAGE * 3))
    pages = pool(queue).allocate(3) or []
    for page, key in zip(pages, page_keys(tokens, PAGE, b"m"), strict=True):
        pool(queue).publish(page, key)
    pool(queue).release(pages)
    hog = pool(queue).allocate(5)
    queue.push(reservation("a", 0, tokens=[*tokens, *range(50, 62)]))
    assert queue.pump() == []
    assert pool(queue).counts().cached == 3
    pool(queue).release(hog or [])
    assert len(queue.pump()) == 1


def test_the_queue_is_bounded_and_what_is_dropped_makes_room() -> None:
    queue = make_queue(4, bound=1)
    push(queue, reservation("running", 4))
    queue.push(reservation("a", 1))
    with pytest.raises(OverloadedError, match="1 reservations wait here"):
        queue.push(reservation("b", 1))
    queue.drop(AttemptKey("a", 1))
    queue.push(reservation("b", 1))
    assert [r.key.request_id for r in queue.waiting] == ["b"]
    assert queue.settle(AttemptKey("never", 1)) is None


@settings(max_examples=200, deadline=None)
@given(sizes=st.lists(st.integers(1, 20), max_size=12), ends=st.lists(st.integers(0, 5), max_size=40))
def test_everybody_is_granted_in_order_within_the_bounds(sizes: list[int], ends: list[int]) -> None:
    queue = make_queue(20)
    order: list[str] = []
    for n, size in enumerate(sizes):
        order += push(queue, reservation(f"r{n}", size, arrival=n))
    for choice in [*ends, *[0] * len(sizes)]:
        held = list(queue.granted)
        reserved = sum(len(g.pages) for g in queue.granted.values())
        assert reserved == pool(queue).counts().reserved
        assert reserved <= RESERVED_SHARE * 20 or len(held) == 1
        if held:
            give_back(queue, held[choice % len(held)].request_id)
        order += names(queue.pump())
        pool(queue).check()
    assert order == [f"r{n}" for n in range(len(sizes))]
    assert pool(queue).counts().free == 20
