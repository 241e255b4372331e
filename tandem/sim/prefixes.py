"""What prompts of a simulation begin with: keys of their pages, made of the names that a trace gives to blocks; and who
is known to hold which pages, as a router knows it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
class Prefixes:
    """Args: page_size: tokens in a page."""

    page_size: int
    _names: BlockNames = field(default_factory=BlockNames, init=False)
    _index: PageIndex[bytes, WorkerKey] = field(default_factory=lambda: PageIndex(MOST_KEYS), init=False)

    def keys(self, arrival: Arrival) -> PageKeys:
        """One for each full page of the prompt, chained over all blocks up to the one that it ends in. What no named
        block covers, of a prompt without any or one whose lengths were scaled, is like no other."""
        blocks, block_size = arrival.block_ids, arrival.block_size
        own = -2 - arrival.number
        if not blocks:
            blocks, block_size = (own,), max(1, arrival.num_input)
        num_lacking = pages_for(arrival.num_input, block_size) - len(blocks)
        chain, _ = self._names.keys((*blocks, *(own for _ in range(num_lacking))))
        num_pages = arrival.num_input // self.page_size
        ends_in = (chain[((page + 1) * self.page_size - 1) // block_size] for page in range(num_pages))
        names = ((number << _PLACE_BITS | page).to_bytes(SHORT, "big") for page, number in enumerate(ends_in))
        return PageKeys(name + _REST for name in names)

    def hear(self, worker: WorkerKey, change: CacheChange) -> None:
        self._index.add(worker, (key[:SHORT] for key in change.came))
        self._index.remove(worker, (key[:SHORT] for key in change.went))

    def lose(self, worker: WorkerKey) -> None:
        """What it holds from now on is not heard."""
        self._index.drop(worker)

    def held(self, keys: PageKeys, num_tokens: int) -> HeldPrefix[WorkerKey]:
        """Who holds how much of a prompt's beginning, but for its last token."""
        return HeldPrefix(self._index.prefix(self._wanted(keys, num_tokens), self.page_size))

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
