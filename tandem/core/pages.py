"""Host-side accounting of KV pages: who owns each page, what is cached, what an unfinished write may touch.

No tensors here. A page is in exactly one state:

    free ──allocate──> used ──release (last reference)──> cached, when it has a key; else free
    free ──reserve───> reserved ──admit──> used
    used | reserved ──quarantine──> quarantined ──lift──> free
    cached ──acquire──> used          cached ──evict (least recently used first), discard──> free

Of cached pages those that their texts gave back *behind a window* have a queue of their own, until another text finds
them: a long text would else push out all that is cached, by pages of which hardly any is looked for again. They go
first while they are more than a tenth of what is cached, so that a beginning of several texts has time to be found.
The idea is that of Johnson and Shasha, "2Q: A Low Overhead High Performance Buffer Management Replacement Algorithm",
VLDB 1994.

`allocate` and `reserve` evict cached pages when free ones do not suffice, and give all pages or none.
"""

from __future__ import annotations

import hashlib
import struct
import sys
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Self, SupportsIndex, cast

_KEY_BYTES = hashlib.sha256().digest_size

# Of the cached pages, those that were given back behind a window and not found since have so much for sure.
_BEHIND_SHARE = 0.1


class PageState(Enum):
    FREE = "free"
    USED = "used"
    RESERVED = "reserved"
    CACHED = "cached"
    QUARANTINED = "quarantined"

    # Members are single, and each page that changes its state looks them up: `Enum` hashes their names, in Python.
    __hash__ = object.__hash__


@dataclass(frozen=True, slots=True)
class PageCounts:
    """How many pages are in each state; they add up to the size of the pool."""

    free: int
    used: int
    reserved: int
    cached: int
    quarantined: int

    @property
    def total(self) -> int:
        return self.free + self.used + self.reserved + self.cached + self.quarantined


@dataclass(frozen=True, slots=True)
class CacheChange:
    """What a prefix cache holds now that it did not hold before, and the other way round."""

    came: tuple[bytes, ...] = ()
    went: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class Shortage:
    """What was found where pages were wanted for a text and could not be had. With it the next try need not look
    through a long cached beginning again: until one more page of it is cached, no fewer are needed.

    Attributes:
        needed: pages beside the cached ones.
        num_there: its leading places whose pages are cached.
        next_key: of the first page that is not cached.
        num_available, num_used: pages of the pool, with the cached ones taken.
        num_given_back: as of the pool.
    """

    needed: int
    num_there: int
    next_key: bytes | None
    num_available: int
    num_used: int
    num_given_back: int


def page_keys(token_ids: Sequence[int], page_size: int, salt: bytes) -> list[bytes]:
    """SHA-256 keys of the full pages of `token_ids`, each chained over all tokens before it.

    `salt` names all else that shapes KV: weights, adapter. A partial last page has no key.
    """
    return list(next_page_keys(token_ids, page_size, salt))


def next_page_keys(
    token_ids: Sequence[int], page_size: int, salt: bytes, known: Sequence[bytes] = ()
) -> Iterator[bytes]:
    """The keys of `page_keys` behind the `known` ones, one by one: whoever stops early has paid for what it took."""
    previous = known[-1] if known else hashlib.sha256(salt).digest()
    for start in range(len(known) * page_size, len(token_ids) - page_size + 1, page_size):
        previous = hashlib.sha256(previous + _packed(token_ids[start : start + page_size])).digest()
        yield previous


def _packed(token_ids: Sequence[int]) -> bytes:
    """Little-endian uint32."""
    if isinstance(token_ids, array) and token_ids.typecode == "I" and sys.byteorder == "little":
        return token_ids.tobytes()
    return struct.pack(f"<{len(token_ids)}I", *token_ids)


def model_salt(weights_sha256: str) -> bytes:
    """The salt of the pages of a model, at its workers and wherever their pages are looked for."""
    return weights_sha256.encode()


def salted(salt: bytes, cache_salt: str) -> bytes:
    """The salt of prompts that share cached prefixes under `cache_salt` only; empty: under none."""
    return hashlib.sha256(salt + b"\0cache_salt\0" + cache_salt.encode()).digest() if cache_salt else salt


def private_page_keys(
    token_ids: Sequence[int], page_size: int, salt: bytes, owner: str, shared: Sequence[bytes] = ()
) -> list[bytes]:
    """Keys of all pages of `token_ids`, a partial last one too, under which only `owner` finds them.

    Chained over the tokens as `page_keys` are: the same owner with other tokens finds nothing. `shared` are the keys
    of the leading full pages that everybody may find; they are used as they are.
    """
    own_salt = hashlib.sha256(salt + b"\0private\0" + owner.encode()).digest()
    keys = list(shared) or page_keys(token_ids, page_size, own_salt)
    rest = token_ids[len(keys) * page_size :]
    if rest:
        keys += page_keys(rest, len(rest), own_salt + (keys[-1] if keys else b""))
    return keys


def windowed_key(key: bytes, group: int) -> bytes:
    """The key of a page for layers with a window, where the page for those that see all has `key`: the `group`th of
    that place, see `tandem.core.layer_groups`."""
    return key + bytes((group,))


if TYPE_CHECKING:  # until Python 3.12 an array has no items when a class is made
    _Int32s = array[int]
else:
    _Int32s = array


class PageTable(_Int32s):
    """The pages of one sequence in the order of its tokens, int32: grows in place, and numpy copies it without a walk.

    Attributes:
        num_edits: how often pages in it were replaced or taken away, by the ways below. While it stays the same,
            whoever has a copy needs only what was appended.
    """

    __slots__ = ("num_edits",)

    num_edits: int

    def __new__(cls, pages: Iterable[int] = ()) -> Self:
        table = cast(Self, super().__new__(cls, "i", pages))
        table.num_edits = 0
        return table

    def hide(self, begin: int, end: int) -> None:
        """Let page 0 stand for pages `[begin, end)`, which nobody reads any more: copies may keep what they have."""
        super().__setitem__(slice(begin, end), array("i", [0]) * (end - begin))

    def __setitem__(self, index: Any, page: Any) -> None:
        super().__setitem__(index, page)
        self.num_edits += 1

    def __delitem__(self, index: SupportsIndex | slice) -> None:
        super().__delitem__(index)
        self.num_edits += 1

    def pop(self, index: int = -1) -> int:
        self.num_edits += 1
        return super().pop(index)

    # Nobody needs these, which would have to count too.
    insert = remove = reverse = byteswap = None  # type: ignore[assignment]


def page_table(pages: Iterable[int] = ()) -> PageTable:
    return PageTable(pages)


def pages_for(num_tokens: int, page_size: int) -> int:
    """Number of pages that hold `num_tokens`."""
    return -(-num_tokens // page_size)


def num_hidden_pages(num_computed: int, page_size: int, window: int) -> int:
    """Leading pages of which no token from `num_computed` on sees anything.

    Each token sees the last `window` tokens, itself included; 0: all.
    """
    return max(0, num_computed - window + 1) // page_size if window else 0


class PagePool:
    """The pages of one arena. Not thread-safe: one thread owns it."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        if num_pages < 1 or page_size < 1:
            raise ValueError(f"a pool needs pages and slots, got {num_pages} pages of {page_size} slots")
        self.num_pages = num_pages
        self.page_size = page_size
        # Lowest page ids come first, so that neighbours are handed out together and their extents merge.
        self._free: OrderedDict[int, None] = OrderedDict((p, None) for p in range(num_pages))
        # Invariant: _state[p] is FREE exactly when p is in _free, CACHED exactly when p is in _lru or in _behind.
        self._state: list[PageState] = [PageState.FREE] * num_pages
        # Invariant: positive exactly when used or reserved.
        self._references: list[int] = [0] * num_pages
        # Invariant: _page_of[_key_of[p]] == p. A free or quarantined page has no key.
        self._key_of: dict[int, bytes] = {}
        self._page_of: dict[bytes, int] = {}
        self._lru: OrderedDict[int, None] = OrderedDict()
        self._behind: OrderedDict[int, None] = OrderedDict()
        # Pages that another text than their first one has had from the cache; all of them have a key.
        self._found: set[int] = set()
        # By page: the number of its last `publish`, which no other has.
        self._entry: list[int] = [0] * num_pages
        self._num_entries = 0
        # Keys that came or went since `take_changes`, and whether they are held now; `None`: nobody takes them. Those
        # of `windowed_key` are not among them: who looks for a beginning looks for the others.
        self._changed: dict[bytes, bool] | None = None
        self._num = dict.fromkeys(PageState, 0)
        self._num[PageState.FREE] = num_pages
        #: All pages from this one on have never been taken.
        self.first_untouched = 0
        #: How often a page has become available, or was taken and is in quarantine: then it is not used any more.
        self.num_given_back = 0

    # -- taking pages

    @property
    def num_available(self) -> int:
        """Pages that `allocate` could give now: free and evictable ones."""
        return len(self._free) + len(self._lru) + len(self._behind)

    def allocate(self, num_pages: int) -> list[int] | None:
        """Take `num_pages` as used, one reference each; `None` when there are not as many."""
        return self._take(num_pages, PageState.USED)

    def reserve(self, num_pages: int) -> list[int] | None:
        """Take `num_pages` as reserved for a handoff; `None` when there are not as many."""
        return self._take(num_pages, PageState.RESERVED)

    def _take(self, num_pages: int, state: PageState) -> list[int] | None:
        if num_pages < 0:
            raise ValueError(f"cannot take {num_pages} pages")
        if num_pages > self.num_available:
            return None
        while len(self._free) < num_pages:
            self._evict_one()
        # The cache gives up a prompt from its end: in their own order neighbours are neighbours again.
        taken = sorted(self._free.popitem(last=False)[0] for _ in range(num_pages))
        for page in taken:
            self._set(page, state)
            self._references[page] = 1
        self.first_untouched = max(self.first_untouched, max(taken, default=-1) + 1)
        return taken

    def _evict_one(self) -> None:
        num_behind = len(self._behind)
        is_behind = num_behind > _BEHIND_SHARE * (num_behind + len(self._lru))
        page, _ = (self._behind if is_behind or not self._lru else self._lru).popitem(last=False)
        self._found.discard(page)
        key = self._key_of.pop(page)
        del self._page_of[key]
        self._note(key, is_held=False)
        self._set(page, PageState.FREE)
        self._free[page] = None

    # -- the prefix cache

    def match(self, keys: Iterable[bytes]) -> int:
        """How many leading `keys` the cache holds, without taking them."""
        num = 0
        for key in keys:
            if key not in self._page_of:
                break
            num += 1
        return num

    def acquire(self, keys: Iterable[bytes]) -> list[int]:
        """Take a reference on the pages of the longest run of leading `keys` that the cache holds."""
        pages: list[int] = []
        for key in keys:
            page = self._page_of.get(key)
            if page is None:
                break
            if self._state[page] is PageState.CACHED:
                self._take_from_cache(page)
                self._set(page, PageState.USED)
            self._found.add(page)
            self._references[page] += 1
            pages.append(page)
        return pages

    def _take_from_cache(self, page: int) -> None:
        del (self._behind if page in self._behind else self._lru)[page]

    def acquire_seen(self, keys: Sequence[bytes], window: int) -> tuple[int, list[int]]:
        """As `acquire`, where a token sees the last `window` tokens only: of the longest beginning whose pages are held
        as far as the token behind it sees them, these.

        Returns:
            How many leading pages are not needed, and the pages behind them. Without a window: 0, and as `acquire`.
        """
        if not window:
            return 0, self.acquire(keys)
        end = len(keys)
        while end:
            first = num_hidden_pages(end * self.page_size, self.page_size, window)
            missing = self._find_missing(keys, first, end)
            if missing is None:
                return first, self.acquire(keys[first:end])
            end = missing  # a beginning that ends behind it, and no later than this one, needs it too
        return 0, []

    def _find_missing(self, keys: Sequence[bytes], first: int, end: int) -> int | None:
        """A page of these that is not held. The first one if it can be: of a text of which nothing is held, one page in
        each window is looked for. Else the last one, so that none is looked for twice."""
        places = (first, *range(end - 1, first, -1)) if first < end else ()
        return next((place for place in places if keys[place] not in self._page_of), None)

    def publish(self, page: int, key: bytes) -> None:
        """Enter a verified, used page under `key`: it is full, or the key is its owner's alone.

        A key that is already held keeps its first page, and a page its first key.
        """
        self._require(page, PageState.USED)
        if page in self._key_of or key in self._page_of:
            return
        self._key_of[page] = key
        self._page_of[key] = page
        self._num_entries += 1
        self._entry[page] = self._num_entries
        self._note(key, is_held=True)

    def entry(self, key: bytes) -> tuple[int, int] | None:
        """The page under `key` and the number of its entry. While both stay the same its bytes do; `None`: no page."""
        page = self._page_of.get(key)
        return None if page is None else (page, self._entry[page])

    def discard(self, keys: Iterable[bytes]) -> None:
        """Nobody finds a page under these keys any more; cached ones are free again. Unknown keys are fine."""
        for key in keys:
            page = self._page_of.pop(key, None)
            if page is None:
                continue
            del self._key_of[page]
            self._found.discard(page)
            self._note(key, is_held=False)
            if self._state[page] is PageState.CACHED:
                self._take_from_cache(page)
                self._to_free(page)

    def drop_cache(self) -> None:
        """Evict every cached page."""
        while self._lru or self._behind:
            self._evict_one()

    def note_changes(self) -> None:
        """From now on somebody takes what changes (`take_changes`)."""
        self._changed = {key: True for key in self._page_of if len(key) <= _KEY_BYTES}

    def take_changes(self) -> CacheChange | None:
        """Which keys came and went since the last call; `None`: none did, or nobody notes them."""
        changed = self._changed
        if not changed:
            return None
        self._changed = {}
        return CacheChange(
            tuple(key for key, is_held in changed.items() if is_held),
            tuple(key for key, is_held in changed.items() if not is_held),
        )

    def _note(self, key: bytes, *, is_held: bool) -> None:
        if self._changed is not None and len(key) <= _KEY_BYTES:
            self._changed[key] = is_held

    # -- giving pages back

    def share(self, pages: Iterable[int]) -> None:
        """Add one reference to each used page (choices of one prompt share its pages)."""
        for page in pages:
            self._require(page, PageState.USED)
            self._references[page] += 1

    def references(self, page: int) -> int:
        """How many owners `page` has."""
        return self._references[page]

    def admit(self, pages: Iterable[int]) -> None:
        """Reserved pages become used: their handoff is verified."""
        for page in pages:
            self._require(page, PageState.RESERVED)
            self._set(page, PageState.USED)

    def release(self, pages: Sequence[int], *, behind: bool = False) -> None:
        """Drop one reference to each page; the last reference frees it, or caches it when it has a key.

        Pages of a sequence are given in order; they enter the LRU list last page first, so that a prefix
        outlives what was built on it. `behind`: no layer that has them sees them any more, and their text goes on.
        """
        for page in reversed(pages):
            self._require(page, PageState.USED, PageState.RESERVED)
            self._references[page] -= 1
            if self._references[page]:
                continue
            if page in self._key_of:
                self._set(page, PageState.CACHED)
                (self._behind if behind and page not in self._found else self._lru)[page] = None
                self.num_given_back += 1
            else:
                self._to_free(page)

    def give_up(self, cached: Sequence[int], needed: int, num_there: int, next_key: bytes | None) -> Shortage:
        """Release the `cached` pages of a text, as the others that it needs cannot be had; see `Shortage`."""
        num_available, num_used = self.num_available, self._num[PageState.USED]
        self.release(cached)
        return Shortage(needed, num_there, next_key, num_available, num_used, self.num_given_back)

    def since(self, shortage: Shortage | None) -> tuple[int, int] | None:
        """How many pages were available at most, and used at least, with the cached ones of that text taken now.

        `None`: there was no shortage, or more of the text may be cached than then.
        """
        if shortage is None or shortage.next_key in self._page_of:
            return None
        num_given_back = self.num_given_back - shortage.num_given_back
        return shortage.num_available + num_given_back, shortage.num_used - num_given_back

    def quarantine(self, pages: Iterable[int]) -> None:
        """An unfinished write may still touch these pages: nobody gets them before `lift`."""
        for page in pages:
            self._require(page, PageState.USED, PageState.RESERVED)
            if self._references[page] != 1:
                raise ValueError(f"page {page} has {self._references[page]} owners, a quarantined page had one")
            key = self._key_of.pop(page, None)
            if key is not None:
                del self._page_of[key]
                self._found.discard(page)
                self._note(key, is_held=False)
            self._references[page] = 0
            self._set(page, PageState.QUARANTINED)
            self.num_given_back += 1

    def lift(self, pages: Iterable[int]) -> None:
        """A fence was seen: quarantined pages are free again."""
        for page in pages:
            self._require(page, PageState.QUARANTINED)
            self._to_free(page)

    def _to_free(self, page: int) -> None:
        self._set(page, PageState.FREE)
        self._free[page] = None
        self.num_given_back += 1

    # -- looking

    def state(self, page: int) -> PageState:
        return self._state[page]

    def counts(self) -> PageCounts:
        return PageCounts(*self._num.values())  # both in the order of `PageState`

    def check(self) -> None:
        """Verify every invariant; for tests and idle moments.

        Raises:
            AssertionError: naming the first page that breaks one.
        """
        assert self.counts().total == self.num_pages, self.counts()
        for page, state in enumerate(self._state):
            assert (page in self._free) == (state is PageState.FREE), (page, state)
            assert (page in self._lru) + (page in self._behind) == (state is PageState.CACHED), (page, state)
            live = state in (PageState.USED, PageState.RESERVED)
            assert (self._references[page] > 0) == live, (page, state, self._references[page])
            key = self._key_of.get(page)
            if key is not None:
                assert state in (PageState.USED, PageState.CACHED), (page, state)
                assert self._page_of[key] == page, (page, self._page_of[key])
            assert state is not PageState.CACHED or key is not None, page
        assert len(self._page_of) == len(self._key_of)
        assert self._found <= self._key_of.keys()

    def _set(self, page: int, state: PageState) -> None:
        self._num[self._state[page]] -= 1
        self._num[state] += 1
        self._state[page] = state

    def _require(self, page: int, *states: PageState) -> None:
        if self._state[page] not in states:
            raise ValueError(
                f"page {page} is {self._state[page].value}, expected {' or '.join(s.value for s in states)}"
            )
