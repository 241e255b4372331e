"""Copies of pages are right, whatever happens between copying, evicting and reading; no prompt waits long."""

from __future__ import annotations

import hashlib
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tandem.core.pages import CacheChange, PagePool, PageState, page_keys
from tandem.core.token_ids import token_ids
from tandem.worker.batch import SchedulerLimits
from tandem.worker.host_tier import HostTier
from tandem.worker.page_tiers import TieredPages
from tandem.worker.scheduler import BatchScheduler

PAGE_SIZE = 4
PAGE_BYTES = 8
PROMPTS = {name: [f"{name}{depth}".encode() for depth in range(4)] for name in ("a", "b")}
PROMPTS["c"] = [*PROMPTS["a"][:2], b"c2", b"c3"]  # begins as `a` does


def content(key: bytes) -> bytes:
    """What a page under this key must hold."""
    return hashlib.sha256(key).digest()[:PAGE_BYTES]


class Steps:
    """Calls that a test runs one by one, in order."""

    def __init__(self) -> None:
        self.calls: deque[Callable[[], None]] = deque()

    def put(self, call: Callable[[], None]) -> None:
        self.calls.append(call)

    def run_one(self) -> None:
        self.calls.popleft()()

    def close(self) -> None:
        self.calls.clear()

    def join(self, _: float) -> bool:
        return True


class Memory:
    """Of pages; a page's two halves are read and written one after the other where a test wants it."""

    def __init__(self, num_pages: int) -> None:
        self.pages = [bytes(PAGE_BYTES)] * num_pages

    def read_page(self, page: int, into: memoryview) -> None:
        into[:] = self.pages[page]

    def write_page(self, page: int, data: memoryview) -> None:
        self.pages[page] = bytes(data)


class Lock:
    """Of the pool; another thread that waits for it comes in as soon as it is free."""

    def __init__(self) -> None:
        self.waiting: list[Callable[[], object]] = []

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        waiting, self.waiting = self.waiting, []
        for call in waiting:
            call()


class World:
    """One worker's tiers without threads: its owner, its two lanes and the clock go on when a test says so.

    Args:
        num_far_slots: of a second tier below the first; 0: there is none.
    """

    def __init__(self, num_pages: int, num_slots: int, num_far_slots: int = 0) -> None:
        self.pool = PagePool(num_pages, PAGE_SIZE)
        self.lock = Lock()
        self.scheduler = BatchScheduler(self.pool, SchedulerLimits(8, 32, 16, 100), salt=b"m", lock=self.lock)
        self.memory = Memory(num_pages)
        self.store, self.far = (
            HostTier(memoryview(bytearray(num * PAGE_BYTES)), PAGE_BYTES) for num in (num_slots, num_far_slots)
        )
        self.owner, self.writer, self.reader, self.timers = Steps(), Steps(), Steps(), Steps()
        self.now_s = 0.0
        self.told: set[bytes] = set()
        self.told_near: set[bytes] = set()
        self.tiers = TieredPages(
            self.scheduler,
            self.memory,
            PAGE_BYTES,
            [self.store, self.far] if num_far_slots else [self.store],
            to_owner=self.owner.put,
            call_later=lambda _, call: self.timers.put(call),
            tell=self.hear,
            writer=self.writer,
            reader=self.reader,
            clock=lambda: self.now_s,
        )
        self.scheduler.tiers = self.tiers
        self.went_on: list[str] = []

    def hear(self, change: CacheChange, near: CacheChange) -> None:
        for told, news in ((self.told, change), (self.told_near, near)):
            told.update(news.came)
            told.difference_update(news.went)

    @property
    def lanes(self) -> list[Steps]:
        return [self.owner, self.writer, self.reader]

    def compute(self, keys: Sequence[bytes]) -> list[int] | None:
        """Give a prompt pages, cached ones first, compute the others, and enter them."""
        held = self.pool.acquire(keys)
        fresh = self.pool.allocate(len(keys) - len(held))
        if fresh is None:
            self.pool.release(held)
            return None
        pages = held + fresh
        for index in range(len(held), len(keys)):
            self.memory.pages[pages[index]] = content(keys[index])
            self.pool.publish(pages[index], keys[index])
            self.tiers.entered(keys[index], keys[index - 1] if index else b"")
        return pages

    def fetch(self, name: str, keys: Sequence[bytes]) -> bool:
        return self.tiers.fetch(keys, lambda _: self.went_on.append(name))

    def run(self) -> None:
        """Until nothing is to do but timers."""
        while any(lane.calls for lane in self.lanes):
            for lane in self.lanes:
                while lane.calls:
                    lane.run_one()

    def check(self) -> None:
        self.pool.check()
        for keys in PROMPTS.values():
            for key in keys:
                assert (key in self.told) == self.store.has(key), key
                if (entry := self.pool.entry(key)) is not None:
                    assert self.memory.pages[entry[0]] == content(key), key
                into = memoryview(bytearray(PAGE_BYTES))
                if self.store.has(key) and self.store.get(key, into):
                    assert bytes(into) == content(key), key


class AnyOrder(RuleBasedStateMachine):
    """Prompts come and go, pages are evicted and overwritten; each thread does one thing at a time, in any order."""

    @initialize(num_pages=st.integers(5, 12), num_slots=st.integers(1, 10))
    def start(self, num_pages: int, num_slots: int) -> None:
        self.world = World(num_pages, num_slots)
        self.holdings: list[list[int]] = []
        self.asked: list[str] = []

    @rule(name=st.sampled_from(list(PROMPTS)), length=st.integers(1, 4))
    def compute(self, name: str, length: int) -> None:
        pages = self.world.compute(PROMPTS[name][:length])
        if pages is not None:
            self.holdings.append(pages)

    @precondition(lambda self: self.holdings)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        number = data.draw(st.integers(0, len(self.holdings) - 1))
        self.world.pool.release(self.holdings.pop(number))

    @rule(num=st.integers(1, 6))
    def overwrite(self, num: int) -> None:
        """Somebody takes pages, which evicts cached ones, writes to them and gives them back."""
        pages = self.world.pool.allocate(num)
        for page in pages or []:
            self.world.memory.pages[page] = b"garbage!"
        self.world.pool.release(pages or [])

    @rule(name=st.sampled_from(list(PROMPTS)), length=st.integers(1, 4))
    def fetch(self, name: str, length: int) -> None:
        if self.world.fetch(name, PROMPTS[name][:length]):
            self.asked.append(name)

    @rule(name=st.sampled_from(list(PROMPTS)))
    def discard(self, name: str) -> None:
        self.world.scheduler.discard(PROMPTS[name])

    @rule(number=st.integers(0, 2))
    def step(self, number: int) -> None:
        lane = self.world.lanes[number]
        if lane.calls:
            lane.run_one()

    @rule()
    def settle(self) -> None:
        """All that waits is done, but nobody loses patience."""
        self.world.run()

    @precondition(lambda self: self.world.timers.calls)
    @rule()
    def lose_patience(self) -> None:
        self.world.now_s += 1.0
        self.world.timers.run_one()

    @invariant()
    def is_right(self) -> None:
        if hasattr(self, "world"):
            self.world.check()
            assert len(self.world.went_on) <= len(self.asked)

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        world = self.world
        world.run()
        while world.timers.calls:
            world.timers.run_one()
            world.run()
        assert sorted(world.went_on) == sorted(self.asked)
        for pages in self.holdings:
            world.pool.release(pages)
        world.check()
        counts = world.pool.counts()
        assert (counts.used, counts.reserved, counts.quarantined) == (0, 0, 0)


AnyOrder.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestAnyOrder = AnyOrder.TestCase


def kept_and_evicted(keys: Sequence[bytes], num_pages: int = 8, num_slots: int = 10) -> World:
    """A prompt was computed and written, and the pool has forgotten it."""
    world = World(num_pages, num_slots)
    pages = world.compute(keys)
    assert pages is not None
    world.run()
    world.pool.release(pages)
    world.pool.drop_cache()
    return world


def test_an_evicted_prompt_comes_back_to_the_cache() -> None:
    keys = PROMPTS["a"]
    world = kept_and_evicted(keys)
    assert world.fetch("a", keys)
    assert world.pool.counts().used == 4
    world.run()
    assert world.went_on == ["a"]
    assert world.pool.match(keys) == 4
    assert world.tiers.counters.num_fetched == 4
    world.check()


def kept_in_two() -> World:
    """A prompt of which the near tier has two pages, and the far one all; the pool has forgotten it. A page of the far
    one is read in a second."""
    world = World(num_pages=8, num_slots=10, num_far_slots=10)
    pages = world.compute(PROMPTS["a"])
    world.run()
    world.pool.release(pages or [])
    forget(world)
    get = world.far.get

    def get_slowly(key: bytes, into: memoryview) -> bool:
        world.now_s += 1.0
        return get(key, into)

    world.far.get = get_slowly  # type: ignore[method-assign]
    return world


def forget(world: World) -> None:
    """The pool all pages, and the near tier those behind the second one."""
    world.pool.drop_cache()
    for key in PROMPTS["a"][2:]:
        world.store.discard(key)


def test_it_is_told_what_the_nearest_of_several_tiers_has() -> None:
    world = kept_in_two()
    assert world.told == set(PROMPTS["a"])
    assert world.told_near == set(PROMPTS["a"][:2])
    alone = kept_and_evicted(PROMPTS["a"])
    assert (alone.told, alone.told_near) == (set(PROMPTS["a"]), set())


def test_each_tier_is_read_as_far_as_that_is_sooner_than_computing() -> None:
    keys = PROMPTS["a"]
    world = kept_in_two()
    assert world.fetch("first", keys)  # nothing is known of the speed of computation
    world.run()
    assert world.pool.match(keys) == 4
    forget(world)
    world.tiers.computed(PAGE_SIZE, 0.5)  # the far tier takes twice as long
    assert world.fetch("second", keys)
    world.run()
    assert world.pool.match(keys) == 2
    world.now_s += 100.0  # and that is known no more
    world.tiers.computed(PAGE_SIZE, 2.0)
    assert world.fetch("third", keys)
    world.run()
    assert world.pool.match(keys) == 4
    world.check()


def test_what_the_cache_has_outlives_the_reading_of_the_rest() -> None:
    """Room is taken from others, though they were used later; afterwards all of it can be evicted."""
    keys = PROMPTS["a"]
    world = World(num_pages=8, num_slots=10)
    for prompt in (keys, keys[:2], [f"x{number}".encode() for number in range(6)]):
        pages = world.compute(prompt)
        world.run()
        world.pool.release(pages or [])
    assert world.pool.match(keys) == 2
    assert world.fetch("a", keys)
    assert world.pool.counts().used == 4
    world.run()
    assert world.pool.match(keys) == 4
    assert world.pool.counts().used == 0
    assert world.tiers.counters.num_fetched == 2
    world.check()


def test_a_page_that_is_overwritten_before_it_is_copied_is_not_kept() -> None:
    world = World(4, 10)
    pages = world.compute(PROMPTS["a"])
    assert pages is not None
    world.pool.release(pages)
    taken = world.pool.allocate(1)
    assert taken is not None
    world.memory.pages[taken[0]] = b"garbage!"
    world.run()
    assert world.store.held()[0] == 3
    world.check()


def test_a_page_that_came_again_while_it_was_copied_is_not_taken_for_the_same() -> None:
    """Under its old key, on its old page: what was copied meanwhile may be of neither."""
    (key,) = keys = PROMPTS["a"][:1]
    world = World(1, 10)
    pages = world.compute(keys)
    assert pages is not None
    world.memory.pages[pages[0]] = b"garbage!"  # as if it were on its way to being overwritten
    world.writer.run_one()
    world.writer.run_one()  # it is copied
    world.pool.release(pages)
    world.pool.drop_cache()
    assert world.compute(keys) == pages
    world.owner.run_one()
    world.writer.run_one()
    assert not world.store.has(key)
    world.run()
    world.check()
    assert world.store.has(key)


def test_a_page_that_is_found_to_be_wrong_right_after_it_was_verified_is_not_kept() -> None:
    """At decode the steps' thread finds that out, while the one that owns the pool has just let go of its lock."""
    (key,) = keys = PROMPTS["a"][:1]
    world = World(4, 10)
    world.compute(keys)
    while not world.owner.calls:
        world.writer.run_one()  # until it is copied
    world.lock.waiting.append(lambda: world.scheduler.discard(keys))
    world.owner.run_one()
    world.run()
    assert not world.store.has(key)


def test_a_page_that_is_found_to_be_wrong_while_it_is_read_is_kept_nowhere() -> None:
    """It is read from the far tier, and the near one gets it too: what is thrown away meanwhile stays away."""
    (key,) = keys = PROMPTS["a"][:1]
    world = World(4, 10, num_far_slots=10)
    pages = world.compute(keys)
    world.run()
    world.pool.release(pages or [])
    world.pool.drop_cache()
    world.store.discard(key)
    assert world.fetch("a", keys)
    get = world.far.get

    def get_late(key: bytes, into: memoryview) -> bool:
        """The bytes are there, and only then are they thrown away."""
        is_there = get(key, into)
        world.scheduler.discard(keys)
        world.writer.run_one()
        return is_there

    world.far.get = get_late  # type: ignore[method-assign]
    world.run()
    assert world.went_on == ["a"]
    assert (world.pool.match(keys), world.far.has(key), world.store.has(key)) == (0, False, False)


def test_prompts_that_begin_alike_are_read_once() -> None:
    world = kept_and_evicted(PROMPTS["a"], num_pages=16)
    pages = world.compute(PROMPTS["c"])
    world.run()
    world.pool.release(pages or [])
    world.pool.drop_cache()
    before = world.store.counters.num_read
    assert world.fetch("a", PROMPTS["a"])
    assert world.fetch("c", PROMPTS["c"])
    assert world.fetch("c again", PROMPTS["c"])
    world.run()
    assert sorted(world.went_on) == ["a", "c", "c again"]
    assert world.store.counters.num_read - before == 6  # four of the one, and what the other has of its own
    assert world.pool.match(PROMPTS["c"]) == world.pool.match(PROMPTS["a"]) == 4


def test_a_prompt_does_not_wait_for_a_read_that_hangs() -> None:
    """What comes later is copied nowhere: its pages have new owners. For a while nothing is read."""
    keys = PROMPTS["a"]
    world = kept_and_evicted(keys)
    assert world.fetch("a", keys)
    get = world.store.get
    taken: list[int] = []

    def hang(key: bytes, into: memoryview) -> bool:
        """Until the prompt has lost its patience, and others have its pages."""
        is_there = get(key, into)
        world.timers.run_one()
        world.owner.run_one()
        taken.extend(world.pool.allocate(8) or [])
        for page in taken:
            world.memory.pages[page] = b"theirs!!"
        return is_there

    world.store.get = hang  # type: ignore[method-assign]
    world.reader.run_one()
    world.store.get = get  # type: ignore[method-assign]
    assert world.went_on == ["a"]
    assert world.tiers.counters.num_abandoned == 4
    assert len(taken) == 8
    assert set(world.memory.pages) == {b"theirs!!"}
    world.pool.release(taken)
    world.run()
    assert not world.fetch("a", keys)
    world.now_s += 31.0
    assert world.fetch("a", keys)
    world.run()
    assert world.went_on == ["a", "a"]


def test_what_is_found_to_be_wrong_is_not_read_back() -> None:
    """Neither from where it is kept, nor by a read that is under way."""
    keys = PROMPTS["a"]
    world = kept_and_evicted(keys)
    assert world.fetch("a", keys)
    world.reader.run_one()
    world.scheduler.discard(keys)
    world.run()
    assert world.went_on == ["a"]
    assert world.pool.match(keys) == 0
    assert world.store.held()[0] == 0
    assert not world.fetch("a", keys)


def test_pages_that_are_computed_sooner_are_not_read() -> None:
    keys = PROMPTS["a"]
    world = kept_and_evicted(keys)
    world.tiers.computed(10**12, 1.0)
    assert not world.fetch("a", keys)
    assert world.pool.counts().used == 0


def test_too_few_pages_are_not_worth_waiting_for() -> None:
    keys = PROMPTS["a"]
    world = kept_and_evicted(keys[:2])
    assert not world.tiers.fetch(keys, lambda _: None, at_least=3)
    assert world.tiers.fetch(keys, lambda _: None, at_least=2)


def test_reading_leaves_half_of_the_pool() -> None:
    keys = PROMPTS["a"]
    world = kept_and_evicted(keys, num_pages=6)
    assert world.fetch("a", keys)
    states = [world.pool.state(page) for page in range(6)]
    assert states.count(PageState.USED) == 3
    world.run()
    assert world.pool.match(keys) == 3


def test_a_host_tier_that_is_closed_holds_no_memory_any_more() -> None:
    """A worker that changes its role takes as much for its next life, before its last one is collected."""
    memory: Any = np.zeros(2 * PAGE_BYTES, np.uint8)
    is_held = weakref.ref(memory)
    tier = HostTier(memoryview(memory), PAGE_BYTES)
    del memory
    page, into = memoryview(content(b"a0")), memoryview(bytearray(PAGE_BYTES))
    tier.put(b"a0", b"", page)
    assert tier.get(b"a0", into)
    assert into == page
    tier.close()
    assert is_held() is None
    tier.put(b"a1", b"a0", page)  # by a thread that is in the midst of it
    assert not tier.get(b"a0", into)
    assert not tier.get(b"a1", into)
    assert tier.held() == (0, 0)


def test_pages_behind_a_prompt_in_use_stay_with_it_and_what_was_asked_once_goes() -> None:
    """A conversation whose prompt is computed elsewhere goes on in tiers that are full."""
    world = World(num_pages=40, num_slots=10)

    def keys_of(token: int, num: int) -> list[bytes]:
        return page_keys(token_ids([token]) * (num * PAGE_SIZE), PAGE_SIZE, b"m")

    def computed(keys: list[bytes]) -> None:
        pages = world.compute(keys)
        assert pages is not None
        world.pool.release(pages)
        world.run()

    conversation, once = keys_of(1, 7), keys_of(2, 3)
    for keys in (conversation[:4], once, keys_of(3, 3)):
        computed(keys)
    world.tiers.used(conversation[:4])
    computed(conversation)
    assert all(map(world.store.has, conversation))
    assert not any(map(world.store.has, once))
