"""What prompts of a simulation begin with: keys of their pages, made of the names that a trace gives to blocks; and who
is known to hold which pages, as a router knows it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from router.policy.prefix import HeldPrefix
from router.workers.known_pages import MOST_FORESEEN, MOST_KEYS, SHORT, Foreseen
from router.workers.page_index import PageIndex
from tandem.bench.load.block_names import BlockNames
from tandem.core.identity import WorkerKey
from tandem.core.page_keys import KEY_BYTES, PageKeys
from tandem.core.pages import CacheChange, pages_for
from tandem.sim.load import Arrival

_PLACE_BITS = 24  # of a key that name its page's place in the prompt
_REST = bytes(KEY_BYTES - SHORT)  # of a key: routers know it by what is before


@dataclass(slots=True)
class PageNames:
    """What pages of prompts are called, wherever they lie. Args: page_size: tokens in a page."""

    page_size: int
    _names: BlockNames = field(default_factory=BlockNames, init=False)

    def keys(self, arrival: Arrival) -> PageKeys:
        """One for each full page of the prompt and the answer behind it. What others do not begin with is like no
        other's, but for later turns of its conversation."""
        num_tokens = arrival.num_input + arrival.num_output
        last_tokens = range(self.page_size - 1, num_tokens, self.page_size)
        ends_in = self._of_blocks(arrival, last_tokens) if arrival.block_ids else self._of_texts(arrival, last_tokens)
        names = ((number << _PLACE_BITS | page).to_bytes(SHORT, "big") for page, number in enumerate(ends_in))
        return PageKeys(name + _REST for name in names)

    def _of_blocks(self, arrival: Arrival, last_tokens: range) -> Iterator[int]:
        """What the block is called that each of these tokens is in, chained over all before it. What has no name, as an
        answer from which no other request goes on, or the rest of a prompt whose lengths were scaled, is like no other.
        """
        blocks, size = arrival.block_ids, arrival.block_size
        num_named = len(blocks) * size if arrival.then is not None else min(len(blocks) * size, arrival.num_input)
        chain, _ = self._names.keys((*blocks[: pages_for(num_named, size)], -2 - arrival.number))
        return (chain[token // size] if token < num_named else chain[-1] for token in last_tokens)

    def _of_texts(self, arrival: Arrival, last_tokens: range) -> Iterator[int]:
        """As `_of_blocks`, of what all prompts begin with and what is said behind that."""
        whose = arrival.number if arrival.conversation is None else arrival.conversation
        (common, own), _ = self._names.keys((-1, -2 - whose))
        return (common if token < arrival.num_common else own for token in last_tokens)


@dataclass(slots=True)
class Prefixes:
    """Who holds which pages, as one router knows it. Args: page_size: tokens in a page."""

    page_size: int
    _index: PageIndex[bytes, WorkerKey] = field(default_factory=lambda: PageIndex(MOST_KEYS), init=False)
    _stored: PageIndex[bytes, WorkerKey] = field(default_factory=lambda: PageIndex(MOST_KEYS), init=False)
    _near: PageIndex[bytes, WorkerKey] = field(default_factory=lambda: PageIndex(MOST_KEYS), init=False)

    def hear(self, worker: WorkerKey, change: CacheChange) -> None:
        _note(self._index, worker, change)

    def hear_tiers(self, worker: WorkerKey, change: CacheChange, near: CacheChange) -> None:
        """As `TieredPages` tells."""
        _note(self._stored, worker, change)
        _note(self._near, worker, near)

    def lose(self, worker: WorkerKey) -> None:
        """What it holds from now on is not heard."""
        for index in (self._index, self._stored, self._near):
            index.drop(worker)

    def held(self, keys: PageKeys, num_tokens: int) -> HeldPrefix[WorkerKey]:
        """Who holds how much of a prompt's beginning, but for its last token."""
        wanted = self._wanted(keys, num_tokens)
        return HeldPrefix(*(index.prefix(wanted, self.page_size) for index in (self._index, self._stored, self._near)))

    def foresee(self, workers: Iterable[WorkerKey], keys: PageKeys, num_tokens: int) -> Foreseen:
        """These are about to have the pages of a prompt."""
        wanted = self._wanted(keys, num_tokens)[:MOST_FORESEEN]
        return {worker: self._index.foresee(worker, wanted) for worker in workers}

    def forget(self, foreseen: Foreseen) -> None:
        """What was foreseen and not told of is not there."""
        for worker, keys in foreseen.items():
            self._index.forget(worker, keys)

    def _wanted(self, keys: PageKeys, num_tokens: int) -> Sequence[bytes]:
        return [key[:SHORT] for key in keys[: (num_tokens - 1) // self.page_size]]


def _note(index: PageIndex[bytes, WorkerKey], worker: WorkerKey, change: CacheChange) -> None:
    index.add(worker, (key[:SHORT] for key in change.came))
    index.remove(worker, (key[:SHORT] for key in change.went))
