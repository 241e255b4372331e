"""Which pages a text has where layers differ in what they see. Pure.

A *place* is `page_size` tokens of a text. Where all layers see alike it has one page, with an extent for each layer. In
a *mixed* model some layers see a window and the others all: there a page holds only as many layers as see all, and a
place has one page for these and `num_windowed` pages, which are given back behind the window, for the rest:

    layers that see all    [p][p][p][p][p][p][p][p]
    layers with a window              [p][p][p][p]    each place `num_windowed` pages
                           `num_hidden`^

All pages have the same size, so one pool holds them all, whatever contexts there are; the idea is that of vLLM's hybrid
KV cache manager. Where pages of a text stand in one list, they do so place by place: of each its page for the layers
that see all, then, from place `num_hidden` on, those for the others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tandem.core.pages import PagePool, PageTable, Shortage, num_hidden_pages, page_table, pages_for, windowed_key
from tandem.core.windows import Windows, kept_windows

# What `windowed_key` can tell apart.
_MOST_WINDOWED = 255


@dataclass(frozen=True, slots=True)
class LayerGroups:
    """Of one model.

    Attributes:
        page_size: token slots of a page.
        window: tokens that a token sees in layers with a window, itself included; 0: all layers see all.
        num_windowed: pages of a place for the layers with a window, in a mixed model; 0: all layers see alike.
    """

    page_size: int
    window: int = 0
    num_windowed: int = 0

    @property
    def num_of_place(self) -> int:
        """Pages of a place, at most."""
        return 1 + self.num_windowed

    def num_hidden(self, num_computed: int) -> int:
        """Leading places that no layer with a window sees from token `num_computed` on."""
        return num_hidden_pages(num_computed, self.page_size, self.window)

    def num_seen(self, num_tokens: int) -> int:
        """Pages that a token behind so many sees: those that a decode worker needs."""
        num_places, num_hidden = pages_for(num_tokens, self.page_size), self.num_hidden(num_tokens)
        if self.num_windowed:
            return num_places + self.num_windowed * (num_places - num_hidden)
        return num_places - num_hidden

    def pages_of(self, num_places: int, num_in_window: int) -> int:
        """Pages of so many places, where layers with a window have theirs for `num_in_window` of them."""
        return num_places + self.num_windowed * num_in_window if self.num_windowed else num_in_window

    def most_in_window(self, chunk_size: int) -> int:
        """Places that a chunk is written to and that layers with a window see from it, wherever in a page it begins."""
        return pages_for(self.window + chunk_size - 2, self.page_size) + 1

    def most_pages(self, num_tokens: int, chunk_size: int) -> int:
        """Pages that a text of so many tokens has at a time, at most, where it is computed in such chunks; some may be
        cached ones, beside its own."""
        num_places = pages_for(num_tokens, self.page_size)
        return self.pages_of(num_places, min(num_places, self._most_held(chunk_size))) if self.window else num_places

    def most_tokens(self, num_pages: int, chunk_size: int) -> int:
        """Tokens of the longest text that has room in so many pages; where no layer sees all, of the longest that is
        kept as a whole."""
        if not self.num_windowed:
            return num_pages * self.page_size
        num_behind = num_pages - self.num_windowed * self._most_held(chunk_size)
        return max(num_pages // self.num_of_place, num_behind) * self.page_size

    def _most_held(self, chunk_size: int) -> int:
        """Places whose pages for layers with a window one text has."""
        return pages_for(self.window, self.page_size) + self.most_in_window(chunk_size)

    def acquire(self, pool: PagePool, keys: Sequence[bytes]) -> tuple[int, list[int]]:
        """Take a reference on the pages of the longest beginning that is cached as far as the token behind it sees it.

        Args:
            keys: one for each place, as far as a beginning may be taken.

        Returns:
            How many places layers with a window do not need of it, and its held pages in one list.
        """
        if not self.num_windowed:
            return pool.acquire_seen(keys, self.window)
        end = pool.match(keys)
        while end:
            first = self.num_hidden(end * self.page_size)
            missing = next((place for place in range(end - 1, first - 1, -1) if not self._has(pool, keys[place])), None)
            if missing is None:
                return first, pool.acquire(self.listed_keys(keys[:end], first))
            end = missing  # a beginning that ends behind it, and no later than this one, needs it too
        return 0, []

    def give_up(
        self,
        pool: PagePool,
        cached: Sequence[int],
        needed: int,
        num_there: int,
        keys: Sequence[bytes],
        num_found: int,
    ) -> Shortage | None:
        """Release the `cached` pages of a text, as the `needed` others cannot be had.

        In a mixed model a page that comes into a gap within a window may make the beginning longer. That is not looked
        for: the text finds it when as many pages as it needs without that have been given back.

        Args:
            num_there: places of its beginning that were found.
            keys: that it looked for.
            num_found: how many of the leading ones it can use.

        Returns:
            What was found; `None`: where no layer sees all, pages anywhere in a window may make a longer beginning.
        """
        if self.num_windowed and pool.match(keys[num_found : num_found + 1]):
            num_found = pool.match(keys)
        shortage = pool.give_up(cached, needed, num_there, keys[num_found] if num_found < len(keys) else None)
        return shortage if self.num_windowed or not self.window else None

    def _has(self, pool: PagePool, key: bytes) -> bool:
        """Whether the pages of a place for the layers with a window are cached."""
        return all(pool.match((windowed_key(key, group),)) for group in range(self.num_windowed))

    # -- the pages of a handoff, of which the receiver has a beginning

    def index_of(self, place: int, num_hidden: int) -> int:
        """Pages before `place` as a handoff counts them. Where no layer sees all, pages that nobody sees count too."""
        return place + self.num_windowed * max(0, place - num_hidden)

    def num_handed_off(self, num_tokens: int) -> int:
        """As a handoff of a prompt of so many tokens counts its pages."""
        return self.index_of(pages_for(num_tokens, self.page_size), self.num_hidden(num_tokens))

    def whole_places(self, num_pages: int, num_hidden: int) -> int:
        """Leading places of which all pages are among the first `num_pages`; the reverse of `index_of`."""
        if num_pages <= num_hidden:
            return num_pages
        return num_hidden + (num_pages - num_hidden) // self.num_of_place

    # -- one list, and tables

    def places_of(self, num_pages: int, num_hidden: int) -> int:
        """Places of a text of which so many pages are held, behind `num_hidden` places that layers with a window do not
        see."""
        return self.whole_places(num_pages if self.num_windowed else num_pages + num_hidden, num_hidden)

    def tables(self, pages: Sequence[int], num_hidden: int, num_places: int) -> tuple[PageTable, PageTable]:
        """Block tables of a text of `num_places` places whose held pages are these, in one list: of the layers that see
        all, and of those with a window, `num_windowed` for each place; where all see alike, the first one only.

        Pages of layers with a window may be missing at the end. What is given back stands as page 0.
        """
        num_windowed = self.num_windowed
        if not num_windowed:
            return page_table([0] * num_hidden + list(pages)), page_table()
        end = num_hidden + (len(pages) - num_places) // num_windowed  # of places with all pages
        after = num_hidden + (end - num_hidden) * self.num_of_place
        both = pages[num_hidden:after]
        windowed = page_table(page_table([0]) * (num_hidden * num_windowed))
        windowed.extend(page for index, page in enumerate(both) if index % self.num_of_place)
        table = page_table(pages[:num_hidden])
        table.extend(both[:: self.num_of_place])
        table.extend(pages[after:])
        return table, windowed

    def listed(
        self, pages: PageTable, windowed: PageTable, num_hidden: int, first: int = 0, last: int | None = None
    ) -> Sequence[int]:
        """In one list, the held pages of places `[first, last)`, by default of all; the reverse of `tables`."""
        last = len(pages) if last is None else last
        num_windowed = self.num_windowed
        if not num_windowed:
            return pages[max(first, num_hidden) : last]
        listed = list[int](pages[first : max(first, min(num_hidden, last))])
        begin = max(first, num_hidden)
        for place, page in enumerate(pages[begin:last], begin):
            listed.append(page)
            listed += windowed[place * num_windowed : (place + 1) * num_windowed]
        return listed

    def listed_keys(self, keys: Sequence[bytes], num_hidden: int, first: int = 0) -> list[bytes]:
        """Keys of the pages that `listed` gives; `keys` has one for each place, from `first` on."""
        num_windowed = self.num_windowed
        if not num_windowed:
            return list(keys[max(0, num_hidden - first) :])
        listed = list[bytes]()
        for place, key in enumerate(keys, first):
            listed.append(key)
            if place >= num_hidden:
                listed += [windowed_key(key, group) for group in range(num_windowed)]
        return listed


def num_windowed_pages(num_full: int, num_windowed: int) -> int:
    """Pages of a place for so many layers with a window beside so many that see all.

    0: such a model keeps all pages. Where fewer layers have a window than see all, a page for them would be half empty.
    """
    num_pages = -(-num_windowed // num_full) if 0 < num_full <= num_windowed else 0
    return num_pages if num_pages <= _MOST_WINDOWED else 0


@dataclass(frozen=True, slots=True)
class KeptPages:
    """The pages that a worker keeps of a model's texts.

    Attributes:
        groups: of its layers.
        num_layers: of a page.
        num_all: layers of the model.
    """

    groups: LayerGroups
    num_layers: int
    num_all: int

    @property
    def is_mixed(self) -> bool:
        """Whether layers with a window have pages of their own."""
        return self.groups.num_windowed > 0

    def page_bytes(self, token_bytes: float) -> float:
        """Of one page, where K and V of a token have so many bytes in all layers of the model."""
        return self.groups.page_size * token_bytes * self.num_layers / self.num_all

    def num_pages(self, num_tokens: int) -> int:
        """Pages that there are in the memory of K and V of so many tokens in all layers."""
        return num_tokens * self.num_all // (self.groups.page_size * self.num_layers)

    def num_slots(self, num_pages: int) -> int:
        """Tokens for which so many pages have room; of a mixed model in texts that are within the window."""
        return num_pages // self.groups.num_of_place * self.groups.page_size


def kept_pages(
    windows: Windows,
    num_layers: int,
    page_size: int,
    *,
    on_cpu: bool,
    mixed: bool = True,
    max_context: float = math.inf,
) -> KeptPages:
    """Of a model with so many layers.

    Args:
        mixed: workers on CPUs give back pages of mixed models too (`cache.mixed_windows`). Those on GPUs never do:
            their captured decode steps have one block table for all layers.
        max_context: tokens of a text, at most; a window that is no shorter hides nothing.
    """
    num_windowed = num_windowed_pages(windows.num_full, windows.num_windowed)
    if num_windowed and on_cpu and mixed and windows.window < max_context:
        return KeptPages(LayerGroups(page_size, windows.window, num_windowed), windows.num_full, num_layers)
    window = kept_windows(windows, on_cpu=on_cpu).window
    return KeptPages(LayerGroups(page_size, window if window < max_context else 0), num_layers, num_layers)
