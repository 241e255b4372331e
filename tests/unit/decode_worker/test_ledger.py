"""Who gets pages for a prompt, and when: decided without a model, a clock or a wire."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decode_worker.ledger import RESERVED_SHARE, Attempt, AttemptState, Ledger
from kvtransfer.protocol.messages import AttemptKey
from tandem.core.errors import OverloadedError
from tandem.core.page_keys import PageKeys
from tandem.core.pages import PagePool, page_keys
from tandem.core.sampling import SamplingParams
from tandem.core.token_ids import token_ids
from tandem.worker.batch import SchedulerLimits
from tandem.worker.scheduler import BatchScheduler
from tandem.worker.sequence import Sequence
from tandem.worker.turn import turn_of

PAGE = 4
Queue = Ledger[Attempt]
GRANTED, ENTERING, COMPUTING = AttemptState.GRANTED, AttemptState.ENTERING, AttemptState.COMPUTING


def make_queue(num_pages: int = 40, *, seqs: int = 8, bound: int = 100) -> Queue:
    limits = SchedulerLimits(seqs, 32, 16, bound)
    return Ledger(BatchScheduler(PagePool(num_pages, PAGE), limits, salt=b"m"), bound=bound)


def reservation(
    name: str,
    num_pages: int,
    *,
    arrival: int = 0,
    priority: int = 0,
    n: int = 1,
    tokens: list[int] | None = None,
    local: int = 0,
    ageing_s: float = 1000.0,
    unpaced: bool = False,
) -> Attempt:
    """`arrival`: its place in the order of arrival, and the second in which it came."""
    keys = PageKeys(page_keys(tokens, PAGE, b"m") if tokens else ())
    num_tokens = len(tokens) if tokens else num_pages * PAGE
    return Attempt(
        key=AttemptKey(name, 1), turn=turn_of(priority, arrival, ageing_s), arrival=arrival, num_tokens=num_tokens,
        num_running=n, page_keys=keys, max_local_tokens=local, unpaced=unpaced,
    )  # fmt: skip


def push(queue: Queue, *reservations: Attempt) -> list[str]:
    """Queue them and return who is granted at once."""
    for one in reservations:
        queue.push(one)
    return names(pump(queue))


def pump(queue: Queue) -> list[Attempt]:
    """Give pages to all that may have them now; prompts to compute here go into the batch."""
    taken = []
    while (one := queue.take()) is not None:
        taken.append(one)
        if one.state is ENTERING:
            compute(queue, one)
    return taken


def names(taken: list[Attempt]) -> list[str]:
    return [t.key.request_id for t in taken]


def give_back(queue: Queue, name: str) -> None:
    """The handoff ended without admission."""
    attempt = queue.attempts[AttemptKey(name, 1)]
    queue.end(attempt, attempt.pages, (), quarantined=False)


def compute(queue: Queue, taken: Attempt) -> None:
    key = taken.key
    num_tokens, num_cached = taken.num_tokens, len(taken.cached) * PAGE
    ids, turn, arrival = token_ids([1] * num_tokens), taken.turn, taken.arrival
    sequence = Sequence(key.request_id, 1, 0, turn, arrival, ids, num_tokens, SamplingParams(), True, num_cached)
    sequence.pages = [*taken.cached, *taken.pages]
    queue._scheduler.enter(sequence)
    queue.set_state(taken, COMPUTING)


def computed(queue: Queue, name: str) -> None:
    """The prompt is computed, and all choices ended with it."""
    queue.remove(queue.attempts[AttemptKey(name, 1)])
    (sequence,) = (s for s in queue._scheduler.running if s.request_id == name)
    pool(queue).release(queue._scheduler.remove(sequence))


def cache(queue: Queue, tokens: list[int]) -> list[int]:
    """Pages of an ended request, in the prefix cache."""
    keys = page_keys(tokens, PAGE, b"m")
    pages = pool(queue).allocate(len(keys)) or []
    for page, key in zip(pages, keys, strict=True):
        pool(queue).publish(page, key)
    pool(queue).release(pages)
    return pages


def pool(queue: Queue) -> PagePool:
    return queue._pool


def run(queue: Queue, num: int, pages_each: int = 1) -> list[Sequence]:
    """Sequences that run already."""
    running = []
    for n in range(num):
        sequence = Sequence("run", 1, n, 0, n, token_ids([1] * PAGE), PAGE, SamplingParams(), num_computed=PAGE - 1)
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
    assert names(pump(queue)) == ["r2"]


def test_one_is_always_allowed_when_nothing_else_is_reserved() -> None:
    queue = make_queue(40)
    assert push(queue, reservation("large", 39), reservation("other", 11, arrival=1)) == ["large"]
    give_back(queue, "large")
    assert names(pump(queue)) == ["other"]


def test_one_that_needs_more_than_the_quarter_and_those_within_it_are_reserved_beside_each_other() -> None:
    """A prompt of 120,000 tokens and 32 short ones: neither waits for the others, as there is room for all."""
    queue = make_queue(60)
    asked = [reservation("s0", 8), reservation("large", 30, arrival=1), reservation("s1", 7, arrival=2)]
    assert push(queue, *asked) == ["s0", "large", "s1"]
    assert push(queue, reservation("s2", 1, arrival=3), reservation("large2", 16, arrival=4)) == []
    assert pool(queue).counts().reserved == 45
    give_back(queue, "s0")
    assert names(pump(queue)) == ["s2"]
    give_back(queue, "large")
    assert names(pump(queue)) == ["large2"]


def test_while_the_head_lacks_pages_others_pass_it_with_no_more_of_them_than_it_needs() -> None:
    queue = make_queue(40)
    (running,) = run(queue, 1, pages_each=30)
    small = [reservation(f"s{n}", 4, arrival=n) for n in range(1, 9)]
    assert push(queue, reservation("head", 10), *small) == ["s1", "s2"], "of the ten pages that are left one is to grow"
    for name in ("s2", "s1"):
        give_back(queue, name)
        assert pump(queue) == [], "eight of ten pages have passed, and four more are too many"
    pool(queue).release(queue._scheduler.remove(running))
    assert names(pump(queue)) == ["head"], "and then the cap of all that is reserved holds"


def test_nobody_passes_a_head_that_waits_for_a_place_in_the_batch() -> None:
    queue = make_queue(40, seqs=4)
    run(queue, 3)
    assert push(queue, reservation("pair", 2, n=2), reservation("one", 1, arrival=1)) == []


class CountingPool(PagePool):
    """Counts how many cached pages were taken."""

    num_acquired = 0

    def acquire(self, keys: Iterable[bytes]) -> list[int]:
        pages = super().acquire(keys)
        self.num_acquired += len(pages)
        return pages


def test_who_lacks_pages_does_not_look_through_its_cached_beginning_at_each_step() -> None:
    pages = CountingPool(2_100, PAGE)
    scheduler = BatchScheduler(pages, SchedulerLimits(8, 32, 16, 100), salt=b"m")
    queue: Queue = Ledger(scheduler, bound=100)
    tokens = [1] * (2_000 * PAGE)
    cache(queue, tokens)
    (running,) = run(queue, 1, pages_each=60)
    assert push(queue, reservation("long", 0, tokens=[*tokens, *[2] * (71 * PAGE)], local=99_999)) == []
    assert pages.num_acquired == 2_000
    for _ in range(31):  # each step makes a page available: with 40 that are not enough, as one is to grow into
        pages.release([running.pages.pop()])
        assert pump(queue) == []
        assert pages.num_acquired == 2_000
    pages.release([running.pages.pop()])
    assert names(pump(queue)) == ["long"]


def test_who_lacks_pages_looks_again_when_more_of_its_beginning_is_cached() -> None:
    queue = make_queue(20)
    tokens = [1] * (12 * PAGE)
    (running,) = run(queue, 1, pages_each=12)
    assert push(queue, reservation("a", 0, tokens=tokens, local=999)) == []
    for page, key in zip(running.pages, page_keys(tokens, PAGE, b"m"), strict=True):
        pool(queue).publish(page, key)
    assert names(pump(queue)) == ["a"]


def test_priority_goes_before_age() -> None:
    queue = make_queue(40)
    push(queue, reservation("blocker", 10))
    push(queue, reservation("old", 1, arrival=1), reservation("urgent", 1, arrival=2, priority=-1))
    assert [r.key.request_id for r in queue.waiting] == ["urgent", "old"]


def test_nobody_starves_however_many_urgent_ones_come() -> None:
    """One comes a second, and one is granted: three levels of ten seconds each are thirty before the low one."""
    queue = make_queue(4)
    queue.push(reservation("low", 4, priority=3, ageing_s=10.0))
    order = []
    for second in range(1, 60):
        queue.push(reservation(f"urgent{second}", 4, arrival=second, ageing_s=10.0))
        (name,) = names(pump(queue))
        order.append(name)
        give_back(queue, name)
    assert order.index("low") == 29


def test_what_runs_keeps_a_page_each_to_grow_into() -> None:
    queue = make_queue(12, seqs=20)
    running = run(queue, 5)
    assert push(queue, reservation("a", 3)) == [], "7 pages are left, 5 of them for growth"
    pool(queue).release(queue._scheduler.remove(running[0]))
    assert names(pump(queue)) == ["a"], "8 pages are left, 4 of them for growth"


def test_nothing_new_while_a_preempted_one_waits() -> None:
    queue = make_queue(40)
    (sequence,) = run(queue, 1)
    pool(queue).release(queue._scheduler.remove(sequence))
    queue._scheduler.add(sequence)
    assert push(queue, reservation("a", 1)) == []
    queue._scheduler.remove(sequence)
    assert names(pump(queue)) == ["a"]


def test_places_in_the_batch_are_counted_with_all_choices_to_come() -> None:
    queue = make_queue(200, seqs=4)
    run(queue, 1)
    assert push(queue, reservation("two", 1, n=2), reservation("more", 1, arrival=1, n=2)) == ["two"]
    two = queue.attempts[AttemptKey("two", 1)]
    queue.admit(two)
    assert pump(queue) == [], "admitted ones will run"
    queue.set_state(two, AttemptState.RUNNING)
    assert names(pump(queue)) == ["more"], "1 + 2 of 4; running ones are counted by the scheduler"


def test_more_choices_than_places_may_run_alone() -> None:
    queue = make_queue(200, seqs=4)
    assert push(queue, reservation("wide", 1, n=9), reservation("next", 1, arrival=1)) == ["wide"]


def test_cached_pages_are_pinned_while_they_are_granted() -> None:
    queue = make_queue(8)
    tokens = list(range(PAGE * 3))
    pages = cache(queue, tokens)
    queue.push(reservation("a", 3, tokens=tokens))
    (granted,) = pump(queue)
    assert list(granted.cached) == pages[:2], "the last page is always sent"
    assert len(granted.pages) == 1
    assert pool(queue).allocate(6) is None, "what is granted cannot be evicted"
    give_back(queue, "a")
    assert pool(queue).counts().used == pool(queue).counts().reserved == 0


def test_a_refused_head_leaves_cached_pages_where_they_were() -> None:
    queue = make_queue(8)
    tokens = list(range(PAGE * 3))
    cache(queue, tokens)
    hog = pool(queue).allocate(5)
    queue.push(reservation("a", 0, tokens=[*tokens, *range(50, 62)]))
    assert pump(queue) == []
    assert pool(queue).counts().cached == 3
    pool(queue).release(hog or [])
    assert len(pump(queue)) == 1


def test_the_queue_is_bounded_and_what_is_dropped_makes_room() -> None:
    queue = make_queue(4, bound=1)
    push(queue, reservation("running", 4))
    queue.push(reservation("a", 1))
    with pytest.raises(OverloadedError, match="1 reservations wait here"):
        queue.push(reservation("b", 1))
    queue.remove(queue.attempts[AttemptKey("a", 1)])
    queue.push(reservation("b", 1))
    assert [r.key.request_id for r in queue.waiting] == ["b"]


# ---- computed here


@pytest.mark.parametrize(("missing_at_most", "state"), [(0, GRANTED), (3 * PAGE - 1, GRANTED), (3 * PAGE, COMPUTING)])
def test_a_prompt_is_computed_here_when_little_of_it_is_missing(missing_at_most: int, state: AttemptState) -> None:
    queue = make_queue()
    tokens = list(range(5 * PAGE))
    cached = cache(queue, tokens[: 2 * PAGE])
    queue.push(reservation("a", 5, tokens=tokens, local=missing_at_most))
    (taken,) = pump(queue)
    assert taken.state is state
    assert list(taken.cached) == cached
    counts = pool(queue).counts()
    assert (counts.used, counts.reserved) == ((5, 0) if state is COMPUTING else (2, 3))


def test_the_last_token_is_computed_even_if_all_pages_are_cached() -> None:
    queue = make_queue()
    tokens = list(range(3 * PAGE))
    cache(queue, tokens)
    queue.push(reservation("a", 3, tokens=tokens, local=PAGE))
    (taken,) = pump(queue)
    assert (len(taken.cached), len(taken.pages)) == (2, 1), "its logits are wanted, and its page is private"


def test_pages_of_prompts_computed_here_are_not_reserved_ones() -> None:
    queue = make_queue(40)
    mixed = [reservation("g", 8), reservation("l", 12, arrival=1, local=48), reservation("h", 2, arrival=2)]
    assert push(queue, *mixed) == ["g", "l", "h"], "8 + 2 of 10 are reserved; the 12 are not among them"
    queue.push(reservation("i", 1, arrival=3))
    assert pump(queue) == []


def test_a_prompt_computed_here_waits_for_room_to_grow() -> None:
    queue = make_queue(12, seqs=20)
    running = run(queue, 5)
    assert push(queue, reservation("l", 3, local=99), reservation("s", 3, arrival=1)) == []
    pool(queue).release(queue._scheduler.remove(running[0]))
    assert names(pump(queue)) == ["l"]


def test_a_prompt_computed_here_keeps_places_for_its_choices() -> None:
    queue = make_queue(200, seqs=4)
    assert push(queue, reservation("wide", 1, n=3, local=99)) == ["wide"]
    assert push(queue, reservation("two", 1, arrival=1, n=2)) == [], "1 runs, 2 more come, 4 are allowed"
    assert push(queue, reservation("urgent", 1, priority=-1)) == ["urgent"]
    give_back(queue, "urgent")
    computed(queue, "wide")
    assert names(pump(queue)) == ["two"]


def test_prompts_of_a_colocated_cluster_take_pages_when_those_before_them_are_nearly_computed() -> None:
    """Two chunks are 8 pages."""
    queue = make_queue(60)
    asked = [reservation(f"p{n}", num, arrival=n, local=999, unpaced=True) for n, num in enumerate((10, 2, 6, 1))]
    assert push(queue, *asked) == ["p0"], "ten pages are left to compute"
    (first,) = queue._scheduler.running
    first.num_computed = 2 * PAGE
    assert names(pump(queue)) == ["p1"], "eight are left, and then ten again"
    first.num_computed = 4 * PAGE
    assert names(pump(queue)) == ["p2"], "of both together"
    computed(queue, "p0")
    assert names(pump(queue)) == ["p3"]


def test_a_prompt_that_is_due_sooner_does_not_wait_for_a_long_one_that_is_computed() -> None:
    queue = make_queue(60)
    long = reservation("long", 20, arrival=1, local=999, unpaced=True)
    long.turn += 50
    assert push(queue, long) == ["long"]
    assert push(queue, reservation("later", 1, arrival=52, local=999, unpaced=True)) == []
    assert push(queue, reservation("sooner", 1, arrival=2, local=999, unpaced=True)) == ["sooner"]


def test_those_that_have_their_pages_and_are_not_in_the_batch_yet_count_too() -> None:
    queue = make_queue(60)
    for number in range(2):
        queue.push(reservation(f"p{number}", 10, arrival=number, local=999, unpaced=True))
    taken = queue.take()
    assert taken is not None
    assert taken.state is ENTERING
    assert queue.take() is None


# ---- pages that were verified before the handoff failed

TOKENS = list(range(4 * PAGE + 1))  # four full pages and a begun one


def fail_with(queue: Queue, *indices: int, quarantined: bool = False, keeps: bool = True) -> list[int]:
    """Grant `TOKENS`, fail with these pages of the grant verified; returns the grant's pages."""
    queue.push(reservation("a", 5, tokens=TOKENS))
    (granted,) = pump(queue)
    verified = tuple((i, granted.pages[i]) for i in indices)
    others = tuple(p for i, p in enumerate(granted.pages) if i not in indices)
    keys = queue.keys_to_keep(granted, verified) if keeps else ()
    queue.end(granted, others, verified, quarantined=quarantined, keys=keys)
    pool(queue).check()
    assert pool(queue).counts().used == pool(queue).counts().reserved == 0
    return list(granted.pages)


@pytest.mark.parametrize("quarantined", [False, True])
def test_verified_pages_stay_as_a_cached_prefix(quarantined: bool) -> None:
    queue = make_queue()
    pages = fail_with(queue, 0, 1, 2, quarantined=quarantined)
    counts = pool(queue).counts()
    assert (counts.cached, counts.quarantined) == (3, 2 if quarantined else 0)
    queue.push(reservation("b", 5, tokens=TOKENS, local=2 * PAGE))
    (again,) = pump(queue)
    assert again.state is COMPUTING, "17 tokens, 12 of them cached"
    assert list(again.cached) == pages[:3]


def test_what_a_writer_gave_up_itself_is_not_kept() -> None:
    queue = make_queue()
    fail_with(queue, 0, 1, 2, keeps=False)
    assert pool(queue).counts().cached == 0


def test_verified_pages_continue_the_cached_ones() -> None:
    queue = make_queue()
    cached = cache(queue, TOKENS[:PAGE])
    pages = fail_with(queue, 0, 1)
    assert pool(queue).acquire(page_keys(TOKENS, PAGE, b"m")) == [*cached, *pages[:2]]


@pytest.mark.parametrize(("verified", "num_kept"), [((1, 2), 0), ((0, 2, 3), 1), ((0, 1, 2, 3, 4), 4), ((4,), 0)])
def test_pages_behind_a_gap_or_without_a_key_are_free(verified: tuple[int, ...], num_kept: int) -> None:
    """A page that lacks its beginning could be found by nobody; one that is not full has no key."""
    queue = make_queue()
    pages = fail_with(queue, *verified)
    assert pool(queue).counts().cached == num_kept
    assert pool(queue).acquire(page_keys(TOKENS, PAGE, b"m")) == pages[:num_kept]


def test_a_page_that_is_cached_meanwhile_is_not_kept_twice() -> None:
    queue = make_queue()
    queue.push(reservation("a", 5, tokens=TOKENS))
    (granted,) = pump(queue)
    meanwhile = cache(queue, TOKENS[: 2 * PAGE])
    verified = tuple(enumerate(granted.pages[:3]))
    queue.end(granted, granted.pages[3:], verified, quarantined=False, keys=queue.keys_to_keep(granted, verified))
    pool(queue).check()
    assert pool(queue).acquire(page_keys(TOKENS, PAGE, b"m")) == [*meanwhile, granted.pages[2]]


class Counted(PageKeys):
    """Of these as many are read as `num_read` says."""

    num_read = 0

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        self.num_read += len(found) if isinstance(index, slice) else 1
        return found

    def __iter__(self) -> Iterator[bytes]:
        self.num_read += len(self)
        return super().__iter__()


@pytest.mark.parametrize("window", [0, 2 * PAGE + 1])
@pytest.mark.parametrize("num_windowed", [0, 2])
def test_of_a_long_prompt_only_the_keys_are_listed_that_verified_pages_may_get(window: int, num_windowed: int) -> None:
    limits = SchedulerLimits(8, 32, 16, 9, window=window, num_windowed=num_windowed if window else 0)
    queue: Queue = Ledger(BatchScheduler(PagePool(900, PAGE), limits, salt=b"m"), bound=9)
    tokens = list(range(200 * PAGE + 1))
    groups, num_hidden = queue._scheduler.groups, queue._scheduler.groups.num_hidden(len(tokens))
    listed = groups.listed_keys(page_keys(tokens, PAGE, b"m"), num_hidden)
    held = len(listed)
    for num_cached, verified in itertools.product({0, 1, held - 5, held - 2}, [(), (1,), (0, 1, 3), (0, 1, 2, 3)]):
        attempt = reservation("a", 0, tokens=tokens)
        attempt.page_keys = counted = Counted(attempt.page_keys)
        attempt.num_hidden, attempt.cached = num_hidden, tuple(range(max(0, num_cached)))
        attempt.num_there = groups.places_of(len(attempt.cached), num_hidden)
        num = [index == place for place, index in enumerate(verified)].count(True)  # no gap is followed by a right one
        found = queue.keys_to_keep(attempt, [(index, 500 + index) for index in verified])
        assert found == listed[len(attempt.cached) :][:num]
        assert counted.num_read <= num + 1


def test_without_a_prefix_cache_verified_pages_are_free() -> None:
    queue = make_queue()
    queue.push(reservation("a", 3))
    (granted,) = pump(queue)
    verified = tuple(enumerate(granted.pages))
    queue.end(granted, (), verified, quarantined=False, keys=queue.keys_to_keep(granted, verified))
    assert pool(queue).counts().free == 40


# ---- many


Sizes = list[tuple[int, bool, int]]
Ends = list[tuple[int, int]]
SIZES = st.lists(st.tuples(st.integers(1, 20), st.booleans(), st.integers(0, 3)), max_size=12)
ENDS = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 20)), max_size=40)


def served_in_order(queue: Queue, sizes: Sizes, ends: Ends, check: Callable[[], object]) -> list[str]:
    """Each end verifies some of a grant's pages, or ends a prompt that was computed here; prompts of a kind share a
    beginning."""
    order: list[str] = []
    for n, (size, is_local, kind) in enumerate(sizes):
        tokens = [kind] * (size - 1) * PAGE + [100 + n] * PAGE
        local = len(tokens) if is_local else 0
        order += push(queue, reservation(f"r{n}", size, arrival=n, tokens=tokens, local=local))
    for choice, num_verified in [*ends, *[(0, 0)] * len(sizes)]:
        check()
        held = [*queue.of_state(GRANTED), *queue.of_state(COMPUTING)]
        if held:
            attempt = held[choice % len(held)]
            if attempt.state is GRANTED:
                pages = attempt.pages
                verified = tuple(enumerate(pages[:num_verified]))
                keys = queue.keys_to_keep(attempt, verified)
                queue.end(attempt, pages[num_verified:], verified, quarantined=False, keys=keys)
            else:
                computed(queue, attempt.key.request_id)
        order += names(pump(queue))
        pool(queue).check()
        assert queue.num_to_come == sum(attempt.num_to_come for attempt in queue.attempts.values())
    counts = pool(queue).counts()
    assert counts.free + counts.cached == counts.total
    return order


@pytest.mark.long
@settings(max_examples=200, deadline=None)
@given(sizes=SIZES, ends=ENDS)
def test_everybody_gets_pages_within_the_bounds(sizes: Sizes, ends: Ends) -> None:
    queue = make_queue(20, seqs=100)

    def check() -> None:
        reserved = [len(attempt.pages) for attempt in queue.of_state(GRANTED)]
        assert sum(reserved) == pool(queue).counts().reserved
        share = RESERVED_SHARE * 20
        assert sum(num for num in reserved if num <= share) <= share
        assert sum(num > share for num in reserved) <= 1

    order = [int(name[1:]) for name in served_in_order(queue, sizes, ends, check)]
    assert sorted(order) == list(range(len(sizes)))
    for place, number in enumerate(order):
        passed = sum(sizes[other][0] for other in order[:place] if other > number)
        assert passed <= sum(size for size, _, _ in sizes[: number + 1]), "at each head before it, and at itself"


@pytest.mark.long
@settings(max_examples=200, deadline=None)
@given(sizes=SIZES, ends=ENDS)
def test_what_the_last_try_found_changes_nothing(sizes: Sizes, ends: Ends) -> None:
    class LooksAlways(Ledger[Attempt]):
        def _still_lacks(self, attempt: Attempt) -> bool:
            return False

    found = []
    for kind in (Ledger[Attempt], LooksAlways):
        scheduler = BatchScheduler(PagePool(20, PAGE), SchedulerLimits(100, 32, 16, 100), salt=b"m")
        found.append(served_in_order(kind(scheduler, bound=100), sizes, ends, lambda: None))
    assert found[0] == found[1]
