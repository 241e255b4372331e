"""Keeps pages of the prefix cache in tiers below the pool, and reads them back before their prompt is computed.

**Down.** A page is copied soon after it has entered the cache, not when it is evicted: so eviction costs nothing and
waits for nothing. The copy is made without holding the page. Afterwards the thread that owns the pool says whether the
page was the same all the time (`PagePool.entry`); if not, the copy is dropped, and the page is simply not in the tier.

    owner:   entered ─┐                  ┌──> verify ──┐
    writer:           └─> copy some pages┘             └─> put into each tier ─> next pages

**Up.** A prompt that is about to be queued asks for its pages. Fresh ones are taken for those that a tier has; a thread
reads and checks each page beside the pool, and only then copies it into its place. When all have come, or the prompt's
patience is over, those that have come enter the cache as if they had been computed, and the prompt goes the usual way.
A read that hangs holds no page: what comes after the end is copied nowhere.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import islice
from typing import Protocol

from tandem.core.pages import CacheChange
from tandem.core.tiers import Fetched, Rate, ReadPlan, plan_read
from tandem.worker.lane import Calls
from tandem.worker.scheduler import BatchScheduler
from tandem.worker.tier_store import TierStore

_log = logging.getLogger(__name__)

# Copies that wait to be written, in bytes; one page at least.
_MOST_COPIED_BYTES = 32 << 20
# Pages that are being read hold at most this part of the pool.
_MOST_READ_SHARE = 0.5
# After a read that took longer than its prompt's patience nothing is read for so long.
_PAUSE_S = 30.0
# Prompts whose use of pages is not noted yet; of more the oldest are forgotten.
_MOST_NOTES = 256
# So long a worker that stops waits for a file operation that is under way.
_STOP_S = 5.0


class PageMemory(Protocol):
    """Where the pool's pages lie: the arena."""

    def read_page(self, page: int, into: memoryview) -> None: ...

    def write_page(self, page: int, data: memoryview) -> None: ...


@dataclass(slots=True)
class FetchCounters:
    """Of all prompts since start, in pages. Changed with the pool's lock held, read by any thread."""

    num_fetched: int = 0  # entered the pool's cache from a tier
    num_missed: int = 0  # full pages of prompts that neither the pool nor a tier had
    num_abandoned: int = 0  # planned, and not there when their prompt went on


@dataclass(slots=True, eq=False)
class _Fetch:
    """Pages that are being read for one prompt, or for several that begin alike."""

    keys: Sequence[bytes]  # of `pages`, in order
    parent: bytes  # of the first one
    held: list[int]  # cached pages before them, pinned meanwhile
    pages: list[int]
    num_discards: int  # as they were counted when it began
    read_s: float  # in which they are expected to be read
    waiting: list[Fetched]  # the first one is told of the pages
    # Guards what follows. Held while a page is copied into the pool's memory.
    lock: threading.Lock = field(default_factory=threading.Lock)
    num_landed: int = 0  # leading pages
    is_over: bool = False


@dataclass(slots=True)
class _Copy:
    """A page that has entered the cache, and a copy of its bytes, which may be torn until that is verified."""

    page: int
    entry: int
    key: bytes
    parent: bytes
    data: memoryview


class TieredPages:
    """The `PageTiers` of a worker.

    Args:
        memory: of the pool's pages.
        page_bytes: of one page.
        stores: the tiers, the nearest one first.
        to_owner: has the thread that owns the pool run a call, from any thread; dropped when the worker stops.
        call_later: has a call run after so many seconds, from any thread, on whichever.
        tell: hears what the tiers, all together, hold now and did not before, and the other way round; and the same of
            the nearest one, where there are several. On one of the tiers' threads at a time.
        writer, reader: the threads; they end with `close`.
        make_buffer: for the bytes of a page.
    """

    def __init__(
        self,
        scheduler: BatchScheduler,
        memory: PageMemory,
        page_bytes: int,
        stores: Sequence[TierStore],
        *,
        to_owner: Callable[[Callable[[], None]], None],
        call_later: Callable[[float, Callable[[], None]], None],
        tell: Callable[[CacheChange, CacheChange], None],
        writer: Calls,
        reader: Calls,
        clock: Callable[[], float] = time.monotonic,
        make_buffer: Callable[[int], memoryview] = lambda num_bytes: memoryview(bytearray(num_bytes)),
    ) -> None:
        self.stores = stores
        self.counters = FetchCounters()
        self._scheduler = scheduler
        self._pool = scheduler.pool
        self._lock: AbstractContextManager[object] = scheduler.lock
        self._memory = memory
        self._page_bytes = page_bytes
        self._to_owner = to_owner
        self._call_later = call_later
        self._tell = tell
        self._telling = threading.Lock()
        self._now = clock
        self._num_at_once = max(1, _MOST_COPIED_BYTES // page_bytes)
        # Guards the three below.
        self._mutex = threading.Lock()
        self._uses: deque[Sequence[bytes]] = deque(maxlen=_MOST_NOTES)  # keys of prompts, to be noted as used
        # By page: what has entered the cache, and is not copied yet. At most one a page, so it is bounded by the pool.
        self._entered: dict[int, tuple[int, bytes, bytes]] = {}
        self._is_writing = False  # a batch is copied, verified or written
        # With the pool's lock held: by key, what is being read.
        self._fetches: dict[bytes, _Fetch] = {}
        self._num_discards = 0
        self._num_reading = 0  # pages of fetches that are not over
        self._reading_s = 0.0  # in which they are expected to be read
        self._compute_rate = Rate()
        self._paused_until_s = float("-inf")
        self._read_rates = [Rate(store.guessed_bytes_per_s) for store in stores]
        self._make_buffer = make_buffer
        self._buffer = make_buffer(page_bytes)  # the reader's
        self.has_found = threading.Event()
        self._writer = writer
        self._reader = reader
        for store in stores:
            store.on_change = self._changed
        self._writer.put(self._find)

    def _find(self) -> None:
        for store in self.stores:
            store.find()
        self.has_found.set()

    def _changed(self, keys: Iterable[bytes]) -> None:
        """On any of the tiers' threads. What is told last is what was found last."""
        nearest = self.stores[:1] if len(self.stores) > 1 else ()
        with self._telling:
            keys = list(keys)
            self._tell(_change(keys, self.stores), _change(keys, nearest) if nearest else CacheChange())

    def close(self) -> None:
        """End the threads. A file operation that hangs is left behind."""
        for store in self.stores:
            store.close()
        lanes = (self._writer, self._reader)
        for lane in lanes:
            lane.close()
        if not all(lane.join(_STOP_S) for lane in lanes):
            _log.warning("a file operation of the page tiers did not end within %g s", _STOP_S)

    # -- down; `entered` and `discarded` with the pool's lock held

    def entered(self, key: bytes, parent: bytes) -> None:
        """As `PageTiers.entered`."""
        entry = self._pool.entry(key)
        if entry is None or all(store.has(key) for store in self.stores):
            return
        page, number = entry
        with self._mutex:
            self._entered[page] = (number, key, parent)
            begins, self._is_writing = not self._is_writing, True
        if begins:
            self._writer.put(self._copy_some)

    def _copy_some(self) -> None:
        """On the writer's thread."""
        with self._mutex:
            pages = list(islice(self._entered, self._num_at_once))
            taken = [(page, *self._entered.pop(page)) for page in pages]
            self._is_writing = bool(taken)
        if not taken:
            return
        copies = []
        for page, entry, key, parent in taken:
            data = self._make_buffer(self._page_bytes)
            self._memory.read_page(page, data)
            copies.append(_Copy(page, entry, key, parent, data))
        self._to_owner(lambda: self._verify(copies))

    def _verify(self, copies: list[_Copy]) -> None:
        """On the owner's thread."""
        with self._lock:
            good = [copy for copy in copies if self._pool.entry(copy.key) == (copy.page, copy.entry)]
            self._writer.put(lambda: self._write(good))  # what is found to be wrong from now on is discarded behind it

    def _write(self, copies: list[_Copy]) -> None:
        for copy in copies:
            for store in self.stores:
                if not store.has(copy.key):
                    store.put(copy.key, copy.parent, copy.data)
        self._copy_some()

    def discarded(self, keys: Iterable[bytes]) -> None:
        """As `PageTiers.discarded`."""
        wrong = list(keys)
        self._num_discards += 1

        def discard() -> None:
            for key in wrong:
                for store in self.stores:
                    store.discard(key)

        self._writer.put(discard)  # behind the writes that are verified already

    # -- up; with the pool's lock held

    def fetch(self, keys: Sequence[bytes], then: Fetched, *, at_least: int = 1) -> bool:
        """As `PageTiers.fetch`."""
        self.used(keys)
        missing = keys[self._pool.match(keys) :]
        if missing and (fetch := self._fetches.get(missing[0])) is not None:
            fetch.waiting.append(lambda _: self._go_on(keys, then, at_least))
            return True
        return self._fetch(keys, then, at_least)

    def _go_on(self, keys: Sequence[bytes], then: Fetched, at_least: int) -> None:
        """Pages of a prompt that begins alike have been read; this one may lack more."""
        with self._lock:
            if self._fetch(keys, then, at_least):
                return
        then(())

    def _fetch(self, keys: Sequence[bytes], then: Fetched, at_least: int) -> bool:
        held = self._pool.acquire(keys)  # so that they outlive what is taken for the others
        missing = keys[len(held) :]
        found = self._find_tiers(missing)
        self.counters.num_missed += len(missing) - len(found)
        plan = self._plan(found)
        pages = None
        if plan is not None and len(held) + plan.num_pages >= at_least:
            pages = self._pool.allocate(plan.num_pages)
        if plan is None or pages is None:
            self._pool.release(held)
            return False
        parent = keys[len(held) - 1] if held else b""
        fetch = _Fetch(missing[: len(pages)], parent, held, pages, self._num_discards, plan.read_s, [then])
        self._fetches.update(dict.fromkeys(fetch.keys, fetch))
        self._num_reading += len(pages)
        self._reading_s += plan.read_s
        self._reader.put(lambda: self._read(fetch))
        self._call_later(plan.patience_s, lambda: self._lose_patience(fetch))
        return True

    def _find_tiers(self, keys: Sequence[bytes]) -> list[int]:
        """Of the leading pages that can be read, since some tier has them and nobody reads them already: the number of
        the nearest tier that has each."""
        found: list[int] = []
        for key in keys:
            tier = next((number for number, store in enumerate(self.stores) if store.has(key)), None)
            if tier is None or key in self._fetches:
                break
            found.append(tier)
        return found

    def _plan(self, found: Sequence[int]) -> ReadPlan | None:
        now_s = self._now()
        if now_s < self._paused_until_s:
            return None
        # What runs must be able to grow meanwhile.
        num_free = self._pool.num_available - len(self._scheduler.running)
        room = min(num_free, int(_MOST_READ_SHARE * self._pool.num_pages) - self._num_reading)
        page_s = [self._page_bytes / rate.at(now_s) for rate in self._read_rates]
        return plan_read(
            [page_s[tier] for tier in found[: max(0, room)]],
            self._pool.page_size,
            ahead_s=self._reading_s,
            tokens_per_s=self._compute_rate.at(now_s),
        )

    def used(self, keys: Sequence[bytes]) -> None:
        """As `PageTiers.used`."""
        with self._mutex:
            begins = not self._uses
            self._uses.append(keys)
        if begins:
            self._writer.put(self._use)

    def _use(self) -> None:
        """On the writer's thread."""
        with self._mutex:
            uses = list(self._uses)
            self._uses.clear()
        for keys in uses:
            for store in self.stores:
                store.use(keys)

    def _read(self, fetch: _Fetch) -> None:
        """On the reader's thread."""
        parent, began_s = fetch.parent, self._now()
        num_bytes, took_s = [0] * len(self.stores), [0.0] * len(self.stores)  # by tier
        for key, page in zip(fetch.keys, fetch.pages, strict=True):
            if fetch.is_over or (tier := self._get(fetch, key, parent)) is None:
                break
            with fetch.lock:
                if fetch.is_over:
                    break
                self._memory.write_page(page, self._buffer)
                fetch.num_landed += 1
            parent, before_s, began_s = key, began_s, self._now()
            num_bytes[tier] += self._page_bytes
            took_s[tier] += began_s - before_s
        for rate, read, seconds in zip(self._read_rates, num_bytes, took_s, strict=True):
            rate.learn(read, seconds, began_s)
        self._to_owner(lambda: self._end(fetch))

    def _get(self, fetch: _Fetch, key: bytes, parent: bytes) -> int | None:
        """Read one page into the buffer, from the nearest tier that has it; a nearer one gets it too. The number of the
        tier; `None`: it is in none."""
        for number, store in enumerate(self.stores):
            if store.get(key, self._buffer):
                for nearer in self.stores[:number]:
                    nearer.put(key, parent, self._buffer)
                    # The page may have been discarded since it was read. If it is from now on, that comes after this.
                    if fetch.num_discards != self._num_discards:
                        nearer.discard(key)
                return number
        return None

    def _lose_patience(self, fetch: _Fetch) -> None:
        if not fetch.is_over:
            self._to_owner(lambda: self._end(fetch, is_late=True))

    def _end(self, fetch: _Fetch, *, is_late: bool = False) -> None:
        """On the owner's thread: all that could be read has been, or it takes too long."""
        with self._lock:
            with fetch.lock:
                if fetch.is_over:
                    return
                fetch.is_over = True
            landed = self._enter(fetch)
            if is_late:
                self._paused_until_s = self._now() + _PAUSE_S
                _log.warning(
                    "%d of %d pages came in time: none are read for %g s", fetch.num_landed, len(fetch.pages), _PAUSE_S
                )
        for then in fetch.waiting:
            then(landed)
            landed = []

    def _enter(self, fetch: _Fetch) -> list[int]:
        """What has landed enters the cache. Returns these pages."""
        pool, num_landed = self._pool, fetch.num_landed
        if fetch.num_discards != self._num_discards:  # one of them may be among what was found to be wrong
            num_landed = 0
        for page, key in zip(fetch.pages[:num_landed], fetch.keys, strict=False):
            pool.publish(page, key)
        pool.release([*fetch.held, *fetch.pages])
        for key in fetch.keys:
            del self._fetches[key]
        self._num_reading -= len(fetch.pages)
        self._reading_s = self._reading_s - fetch.read_s if self._num_reading else 0.0  # no rest of a float is left
        self.counters.num_fetched += num_landed
        self.counters.num_abandoned += len(fetch.pages) - num_landed
        return fetch.pages[:num_landed]

    # -- rates

    def computed(self, num_tokens: int, seconds: float) -> None:
        """As `PageTiers.computed`."""
        self._compute_rate.learn(num_tokens, seconds, self._now())


def _change(keys: Iterable[bytes], stores: Sequence[TierStore]) -> CacheChange:
    """Which of these keys some of the stores have, and which none has."""
    came: list[bytes] = []
    went: list[bytes] = []
    for key in keys:
        (came if any(store.has(key) for store in stores) else went).append(key)
    return CacheChange(tuple(came), tuple(went))
