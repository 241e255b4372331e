"""Page accounting against a model that is too simple to be wrong, and the rules that users of it lean on."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import overload

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tandem.core.pages import (
    PageCounts,
    PagePool,
    PageState,
    Shortage,
    num_hidden_pages,
    page_keys,
    pages_for,
    private_page_keys,
)

PAGE_SIZE = 4
KEYS = [f"key-{i}".encode() for i in range(8)]


class PoolAgainstModel(RuleBasedStateMachine):
    """Any order of calls leaves the pool as the model says, and `check` content.

    The model: a list of holdings (who holds which pages, reserved or used), the quarantined pages, which page has
    which key, the cached pages, least recently used first, those of them that were given back behind a window, and the
    pages that were found. All else follows.
    """

    @initialize(num_pages=st.integers(1, 12))
    def start(self, num_pages: int) -> None:
        self.pool = PagePool(num_pages, PAGE_SIZE)
        self.used: list[list[int]] = []
        self.reserved: list[list[int]] = []
        self.quarantined: list[list[int]] = []
        self.key_of: dict[int, bytes] = {}
        self.cached: list[int] = []
        self.behind: set[int] = set()
        self.found: set[int] = set()
        self.lacking: list[tuple[list[bytes], int, Shortage]] = []  # keys of a text, pages behind them, what was found

    # -- what the model knows

    def references(self, page: int) -> int:
        return sum(holding.count(page) for holding in self.used + self.reserved)

    def free(self) -> set[int]:
        busy = {page for holding in self.used + self.reserved + self.quarantined for page in holding}
        return set(range(self.pool.num_pages)) - busy - set(self.cached)

    def page_of(self, key: bytes) -> int | None:
        return next((page for page, held in self.key_of.items() if held == key), None)

    def leading_run(self, keys: list[bytes]) -> list[int]:
        pages: list[int] = []
        for key in keys:
            page = self.page_of(key)
            if page is None:
                return pages
            pages.append(page)
        return pages

    def victims(self, num_pages: int) -> list[int]:
        """Those behind a window go first while they are more than a tenth."""
        left, victims = list(self.cached), list[int]()
        for _ in range(min(num_pages, len(left))):
            behind = [page for page in left if page in self.behind]
            others = [page for page in left if page not in self.behind]
            victims.append((behind if len(behind) > 0.1 * len(left) or not others else others)[0])
            left.remove(victims[-1])
        return victims

    def evict(self, num_pages: int) -> None:
        for page in self.victims(num_pages):
            del self.key_of[page]
            self.cached.remove(page)
            self.forget(page)

    def forget(self, page: int) -> None:
        """It is cached no more, or nobody finds it."""
        self.behind.discard(page)
        if page not in self.key_of:
            self.found.discard(page)

    # -- rules

    def _take(self, num_pages: int, call: Callable[[int], list[int] | None], holdings: list[list[int]]) -> None:
        free = self.free()
        taken = call(num_pages)
        if num_pages > len(free) + len(self.cached):
            assert taken is None
            return
        num_evicted = max(0, num_pages - len(free))
        evictable = set(self.victims(num_evicted))
        assert taken is not None
        assert len(taken) == len(set(taken)) == num_pages
        assert set(taken) <= free | evictable
        self.evict(num_evicted)
        if taken:
            holdings.append(taken)

    @rule(num_pages=st.integers(0, 13))
    def allocate(self, num_pages: int) -> None:
        self._take(num_pages, self.pool.allocate, self.used)

    @rule(num_pages=st.integers(0, 13))
    def reserve(self, num_pages: int) -> None:
        self._take(num_pages, self.pool.reserve, self.reserved)

    @precondition(lambda self: self.reserved)
    @rule(data=st.data())
    def admit(self, data: st.DataObject) -> None:
        pages = self.reserved.pop(data.draw(st.integers(0, len(self.reserved) - 1)))
        self.pool.admit(pages)
        self.used.append(pages)

    @precondition(lambda self: self.used)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        pages = list(data.draw(st.sampled_from(self.used)))
        self.pool.share(pages)
        self.used.append(pages)

    @precondition(lambda self: self.used or self.reserved)
    @rule(data=st.data(), behind=st.booleans())
    def release(self, data: st.DataObject, behind: bool) -> None:
        holdings = data.draw(st.sampled_from([h for h in (self.used, self.reserved) if h]))
        pages = holdings.pop(data.draw(st.integers(0, len(holdings) - 1)))
        self.pool.release(pages, behind=behind)
        cached = [p for p in reversed(pages) if not self.references(p) and p in self.key_of]
        self.cached += cached
        self.behind.update(set(cached) - self.found if behind else ())

    @precondition(lambda self: self.used)
    @rule(data=st.data(), key=st.sampled_from(KEYS))
    def publish(self, data: st.DataObject, key: bytes) -> None:
        page = data.draw(st.sampled_from(data.draw(st.sampled_from(self.used))))
        self.pool.publish(page, key)
        if page not in self.key_of and self.page_of(key) is None:
            self.key_of[page] = key

    @rule(keys=st.lists(st.sampled_from(KEYS), unique=True, max_size=4))
    def acquire(self, keys: list[bytes]) -> None:
        expected = self.leading_run(keys)
        assert self.pool.match(keys) == len(expected)
        assert self.pool.acquire(keys) == expected
        self.cached = [page for page in self.cached if page not in expected]
        self.behind.difference_update(expected)
        self.found.update(expected)
        if expected:
            self.used.append(expected)

    @rule(keys=st.lists(st.sampled_from(KEYS), unique=True, max_size=4), num_behind=st.integers(1, 6))
    def lack(self, keys: list[bytes], num_behind: int) -> None:
        """A text wants pages and does not take them."""
        run = self.leading_run(keys)
        assert self.pool.acquire(keys) == run
        next_key = keys[len(run)] if len(run) < len(keys) else None
        shortage = self.pool.give_up(run, len(keys) - len(run) + num_behind, len(run), next_key)
        was_cached = [page for page in reversed(run) if page in self.cached]
        self.cached = [page for page in self.cached if page not in was_cached] + was_cached
        self.behind.difference_update(run)
        self.found.update(run)
        self.lacking.append((keys, num_behind, shortage))

    @precondition(lambda self: self.used or self.reserved)
    @rule(data=st.data())
    def quarantine(self, data: st.DataObject) -> None:
        holdings = data.draw(st.sampled_from([h for h in (self.used, self.reserved) if h]))
        pages = data.draw(st.sampled_from(holdings))
        if any(self.references(page) > 1 for page in pages):
            shared = next(page for page in pages if self.references(page) > 1)
            with pytest.raises(ValueError, match=f"page {shared} has"):
                self.pool.quarantine([shared])
            return
        self.pool.quarantine(pages)
        holdings.remove(pages)
        self.quarantined.append(pages)
        for page in pages:
            self.key_of.pop(page, None)
            self.forget(page)

    @precondition(lambda self: self.quarantined)
    @rule(data=st.data())
    def lift(self, data: st.DataObject) -> None:
        pages = self.quarantined.pop(data.draw(st.integers(0, len(self.quarantined) - 1)))
        self.pool.lift(pages)

    @rule(keys=st.lists(st.sampled_from(KEYS), unique=True, max_size=3))
    def discard(self, keys: list[bytes]) -> None:
        self.pool.discard(keys)
        for page in [page for page, key in self.key_of.items() if key in keys]:
            del self.key_of[page]
            self.forget(page)
            if page in self.cached:
                self.cached.remove(page)

    @rule()
    def drop_cache(self) -> None:
        self.pool.drop_cache()
        self.evict(len(self.cached))

    @rule(data=st.data())
    def refuse_what_the_state_forbids(self, data: st.DataObject) -> None:
        page = data.draw(st.integers(0, self.pool.num_pages - 1))
        state = self.pool.state(page)
        calls: dict[str, tuple[Callable[[], None], set[PageState]]] = {
            "admit": (lambda: self.pool.admit([page]), {PageState.RESERVED}),
            "share": (lambda: self.pool.share([page]), {PageState.USED}),
            "publish": (lambda: self.pool.publish(page, b"new"), {PageState.USED}),
            "release": (lambda: self.pool.release([page]), {PageState.USED, PageState.RESERVED}),
            "quarantine": (lambda: self.pool.quarantine([page]), {PageState.USED, PageState.RESERVED}),
            "lift": (lambda: self.pool.lift([page]), {PageState.QUARANTINED}),
        }
        for call, allowed in calls.values():
            if state not in allowed:
                with pytest.raises(ValueError, match=f"page {page} is {state.value}"):
                    call()

    # -- what must hold after every step

    @invariant()
    def pool_is_as_the_model_says(self) -> None:
        self.pool.check()
        used = {page for holding in self.used for page in holding}
        reserved = {page for holding in self.reserved for page in holding}
        quarantined = {page for holding in self.quarantined for page in holding}
        free = self.free()
        assert self.pool.counts() == PageCounts(
            free=len(free),
            used=len(used),
            reserved=len(reserved),
            cached=len(self.cached),
            quarantined=len(quarantined),
        )
        assert self.pool.num_available == len(free) + len(self.cached)
        for page in range(self.pool.num_pages):
            assert self.pool.references(page) == self.references(page)
            expected = (
                PageState.FREE
                if page in free
                else PageState.CACHED
                if page in self.cached
                else PageState.QUARANTINED
                if page in quarantined
                else PageState.RESERVED
                if page in reserved
                else PageState.USED
            )
            assert self.pool.state(page) is expected, page

    @invariant()
    def what_a_text_lacked_says_no_less_than_it_lacks(self) -> None:
        used = {page for holding in self.used for page in holding}
        for keys, num_behind, shortage in self.lacking:
            since = self.pool.since(shortage)
            run = set(self.leading_run(keys))
            if since is None:
                assert shortage.next_key in self.key_of.values()
                continue
            most_available, least_used = since
            needed = len(keys) - len(run) + num_behind
            num_available = len((self.free() | set(self.cached)) - run)
            assert num_available - needed <= most_available - shortage.needed
            assert len(used | run) + needed >= least_used + shortage.needed

    def teardown(self) -> None:
        """Nobody's pages leak: when all is given back, every page can be had again."""
        if not hasattr(self, "pool"):
            return
        for pages in self.used + self.reserved:
            self.pool.release(pages)
        for pages in self.quarantined:
            self.pool.lift(pages)
        assert self.pool.num_available == self.pool.num_pages
        assert len(self.pool.allocate(self.pool.num_pages) or []) == self.pool.num_pages
        self.pool.check()


PoolAgainstModel.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestPoolAgainstModel = PoolAgainstModel.TestCase


# -- taking


def taken(pages: list[int] | None) -> list[int]:
    assert pages is not None
    return pages


def cached_pool(num_pages: int, num_cached: int) -> PagePool:
    """A pool whose first pages are cached under KEYS, page 0 least recently used."""
    pool = PagePool(num_pages, PAGE_SIZE)
    pages = taken(pool.allocate(num_cached))
    for page, key in zip(pages, KEYS, strict=False):
        pool.publish(page, key)
    for page in pages:
        pool.release([page])
    return pool


def test_neighbours_are_handed_out_together() -> None:
    pool = PagePool(8, PAGE_SIZE)
    assert pool.allocate(3) == [0, 1, 2]
    assert pool.reserve(2) == [3, 4]


def test_neighbours_are_neighbours_again_after_the_cache_gave_them_up() -> None:
    """From a prompt's end, so that what is left of it can still be found: their extents would merge no more."""
    pool = cached_pool(4, num_cached=0)
    prompt = taken(pool.allocate(4))
    for page, key in zip(prompt, KEYS, strict=False):
        pool.publish(page, key)
    pool.release(prompt)
    assert pool.allocate(2) == [2, 3]
    assert pool.reserve(2) == [0, 1]


def test_all_pages_or_none() -> None:
    pool = PagePool(4, PAGE_SIZE)
    pool.allocate(2)
    assert pool.allocate(3) is None
    assert pool.counts() == PageCounts(free=2, used=2, reserved=0, cached=0, quarantined=0)


def test_too_large_a_wish_evicts_nothing() -> None:
    pool = cached_pool(4, num_cached=2)
    assert pool.allocate(5) is None
    assert pool.match(KEYS[:2]) == 2


def test_quarantined_pages_are_nobodys_until_lifted() -> None:
    pool = PagePool(2, PAGE_SIZE)
    pages = taken(pool.reserve(2))
    pool.quarantine(pages)
    assert pool.allocate(1) is None
    pool.lift(pages[:1])
    assert pool.allocate(1) == pages[:1]
    assert pool.allocate(1) is None


@pytest.mark.parametrize(("num_pages", "page_size"), [(0, 4), (4, 0), (-1, 4)])
def test_a_pool_needs_pages_and_slots(num_pages: int, page_size: int) -> None:
    with pytest.raises(ValueError, match="needs pages and slots"):
        PagePool(num_pages, page_size)


def test_a_negative_number_of_pages_is_refused() -> None:
    with pytest.raises(ValueError, match="-1"):
        PagePool(1, PAGE_SIZE).allocate(-1)


# -- the prefix cache


def test_a_text_that_leaves_its_pages_behind_a_window_pushes_out_a_tenth_of_the_cache_at_most() -> None:
    """What others have cached they will look for again, and hardly any of the text's own middle."""
    pool = cached_pool(10, num_cached=8)
    for number in range(50):
        (page,) = taken(pool.allocate(1))
        pool.publish(page, b"middle %d" % number)
        pool.release([page], behind=True)
    assert pool.match(KEYS[1:8]) == 7
    assert pool.counts().cached == 10
    pool.check()


def test_a_page_behind_a_window_that_another_text_has_found_is_as_any() -> None:
    """As of instructions that all prompts begin with: the oldest of the others goes before it."""
    pool = cached_pool(4, num_cached=3)
    (page,) = taken(pool.allocate(1))
    pool.publish(page, b"common")
    pool.release([page], behind=True)
    for _ in range(2):
        pool.release(pool.acquire([b"common"]), behind=True)
    assert pool.allocate(3) == [0, 1, 2]
    assert pool.match([b"common"]) == 1
    pool.allocate(1)
    assert pool.match([b"common"]) == 0


def test_least_recently_used_page_goes_first() -> None:
    pool = cached_pool(3, num_cached=3)
    pool.release(pool.acquire(KEYS[:1]))  # page 0 is now the most recently used
    assert pool.allocate(1) == [1]
    assert pool.allocate(1) == [2]
    assert pool.match(KEYS[:1]) == 1
    assert pool.allocate(1) == [0]
    assert pool.match(KEYS[:1]) == 0


def test_prefix_outlives_what_was_built_on_it() -> None:
    pool = PagePool(3, PAGE_SIZE)
    pages = taken(pool.allocate(3))
    for page, key in zip(pages, KEYS, strict=False):
        pool.publish(page, key)
    pool.release(pages)
    pool.allocate(1)
    assert pool.match(KEYS[:3]) == 2, "the last page of the sequence was evicted, not its beginning"


def test_free_pages_are_taken_before_cached_ones() -> None:
    pool = cached_pool(4, num_cached=2)
    assert pool.allocate(2) == [2, 3]
    assert pool.match(KEYS[:2]) == 2


def test_acquired_pages_cannot_be_evicted() -> None:
    pool = cached_pool(2, num_cached=2)
    assert pool.acquire(KEYS[:1]) == [0]
    assert pool.allocate(2) is None
    assert pool.allocate(1) == [1]


def test_page_in_use_can_be_acquired_by_others() -> None:
    pool = PagePool(2, PAGE_SIZE)
    pages = taken(pool.allocate(1))
    pool.publish(pages[0], KEYS[0])
    assert pool.acquire(KEYS[:1]) == pages
    assert pool.references(pages[0]) == 2
    pool.release(pages)
    assert pool.state(pages[0]) is PageState.USED
    pool.release(pages)
    assert pool.state(pages[0]) is PageState.CACHED


class LookedAt(Sequence[bytes]):
    """Keys of a text, and how many of them were looked at."""

    def __init__(self, num_keys: int) -> None:
        self.keys = [str(number).encode() for number in range(num_keys)]
        self.num_looked_at = 0

    def __len__(self) -> int:
        return len(self.keys)

    @overload
    def __getitem__(self, index: int) -> bytes: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[bytes]: ...

    def __getitem__(self, index: int | slice) -> bytes | Sequence[bytes]:
        found = self.keys[index]
        self.num_looked_at += len(found) if isinstance(index, slice) else 1
        return found


def hold(pool: PagePool, keys: Sequence[bytes], held: Sequence[bool]) -> None:
    pages = taken(pool.allocate(sum(held)))
    for page, key in zip(pages, (key for key, is_held in zip(keys, held, strict=True) if is_held), strict=True):
        pool.publish(page, key)


@given(held=st.lists(st.booleans(), max_size=24), window=st.integers(1, 5 * PAGE_SIZE))
def test_the_longest_beginning_is_found_whose_window_is_held(held: list[bool], window: int) -> None:
    keys, pool = LookedAt(len(held)), PagePool(24, PAGE_SIZE)
    hold(pool, keys.keys, held)
    windows = [(num_hidden_pages(end * PAGE_SIZE, PAGE_SIZE, window), end) for end in range(len(held) + 1)]
    first, end = next((first, end) for first, end in reversed(windows) if all(held[first:end]))
    num_hidden, pages = pool.acquire_seen(keys, window)
    assert num_hidden == first
    assert pages == pool.acquire(keys.keys[first:end])
    assert keys.num_looked_at <= 2 * len(held) + len(pages)


def test_a_long_text_of_which_little_is_held_is_not_looked_through() -> None:
    """Each step tries again while a text waits for pages, and several may wait."""
    keys, pool = LookedAt(4096), PagePool(64, PAGE_SIZE)
    hold(pool, keys.keys, [index in range(64) for index in range(4096)])
    num_hidden, pages = pool.acquire_seen(keys, 32 * PAGE_SIZE)
    assert (num_hidden, len(pages)) == (32, 32)
    assert keys.num_looked_at < 4096 / 10


def test_same_content_twice_keeps_its_first_page() -> None:
    pool = PagePool(2, PAGE_SIZE)
    first, second = taken(pool.allocate(2))
    pool.publish(first, KEYS[0])
    pool.publish(second, KEYS[0])
    pool.release([second])
    assert pool.state(second) is PageState.FREE
    assert pool.acquire(KEYS[:1]) == [first]


def test_quarantined_page_leaves_the_cache() -> None:
    pool = PagePool(1, PAGE_SIZE)
    pages = taken(pool.allocate(1))
    pool.publish(pages[0], KEYS[0])
    pool.quarantine(pages)
    assert pool.match(KEYS[:1]) == 0
    pool.lift(pages)
    assert pool.state(pages[0]) is PageState.FREE


def test_reserved_page_is_not_published_before_it_is_verified() -> None:
    pool = PagePool(1, PAGE_SIZE)
    pages = taken(pool.reserve(1))
    with pytest.raises(ValueError, match="page 0 is reserved, expected used"):
        pool.publish(pages[0], KEYS[0])


# -- keys


TOKENS = st.lists(st.integers(0, 1 << 20), max_size=40)


@given(TOKENS, st.integers(1, 8))
def test_one_key_for_each_full_page(tokens: list[int], page_size: int) -> None:
    keys = page_keys(tokens, page_size, b"weights")
    assert len(keys) == len(tokens) // page_size
    assert len(set(keys)) == len(keys)
    assert all(len(key) == hashlib.sha256().digest_size for key in keys)


@given(TOKENS, TOKENS, st.integers(1, 8))
def test_keys_agree_exactly_as_far_as_the_tokens_do(a: list[int], b: list[int], page_size: int) -> None:
    ours, theirs = (page_keys(tokens, page_size, b"weights") for tokens in (a, b))
    for page, (one, other) in enumerate(zip(ours, theirs, strict=False)):
        end = (page + 1) * page_size
        assert (one == other) == (a[:end] == b[:end])


@pytest.mark.long
@given(TOKENS, st.data())
def test_one_earlier_token_changes_every_later_key(tokens: list[int], data: st.DataObject) -> None:
    if len(tokens) < PAGE_SIZE:
        return
    at = data.draw(st.integers(0, len(tokens) // PAGE_SIZE * PAGE_SIZE - 1))
    changed = [*tokens[:at], tokens[at] + 1, *tokens[at + 1 :]]
    ours, theirs = (page_keys(t, PAGE_SIZE, b"weights") for t in (tokens, changed))
    assert ours[: at // PAGE_SIZE] == theirs[: at // PAGE_SIZE]
    assert not set(ours[at // PAGE_SIZE :]) & set(theirs)


@given(TOKENS.filter(lambda tokens: len(tokens) >= PAGE_SIZE))
def test_other_weights_share_no_key(tokens: list[int]) -> None:
    assert not set(page_keys(tokens, PAGE_SIZE, b"weights")) & set(page_keys(tokens, PAGE_SIZE, b"adapter"))


@given(TOKENS, TOKENS, st.integers(1, 8))
def test_private_keys_name_every_page_its_tokens_and_its_owner(a: list[int], b: list[int], page_size: int) -> None:
    ours = private_page_keys(a, page_size, b"weights", "me")
    assert len(ours) == pages_for(len(a), page_size)
    assert not set(ours) & set(page_keys(a, page_size, b"weights"))
    assert not set(ours) & set(private_page_keys(a, page_size, b"weights", "you"))
    assert not set(ours) & set(private_page_keys(a, page_size, b"adapter", "me"))
    assert (ours == private_page_keys(b, page_size, b"weights", "me")) == (a == b)


def test_shared_keys_come_first_and_only_the_rest_is_private() -> None:
    tokens = list(range(10))
    shared = page_keys(tokens, 4, b"w")
    keys = private_page_keys(tokens, 4, b"w", "me", shared)
    assert keys[:2] == shared
    assert len(keys) == 3
    assert private_page_keys([99, *tokens[1:]], 4, b"w", "me", page_keys([99, *tokens[1:]], 4, b"w"))[2] != keys[2]


def test_keys_are_the_same_in_every_process_and_version() -> None:
    # Computed by hand: sha256(sha256(salt) + little-endian uint32 of the page's tokens), chained.
    first = hashlib.sha256(hashlib.sha256(b"w").digest() + bytes([1, 0, 0, 0, 2, 0, 0, 0])).digest()
    second = hashlib.sha256(first + bytes([3, 0, 0, 0, 4, 0, 0, 0])).digest()
    assert page_keys([1, 2, 3, 4, 5], 2, b"w") == [first, second]


@pytest.mark.parametrize(("num_tokens", "expected"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_pages_for(num_tokens: int, expected: int) -> None:
    assert pages_for(num_tokens, page_size=4) == expected


def test_first_untouched_follows_the_highest_page_ever_taken() -> None:
    pool = PagePool(6, 4)
    assert pool.first_untouched == 0
    pages = pool.allocate(3)
    assert pages is not None
    assert pool.first_untouched == 3
    pool.release(pages)
    assert pool.allocate(0) == []
    assert pool.first_untouched == 3
    pool.reserve(2)
    assert pool.first_untouched == 5
