"""What workers have told of their prefix caches and of the tiers below, and what is foreseen: who holds how much of a
prompt's beginning.

Keys are made of a prompt's tokens as workers make them, one by one, and only as far as somebody holds them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice, tee

from kvtransfer.layout import LayoutId
from router.policy.prefix import HeldPrefix
from router.workers.page_index import PageIndex
from tandem.core.identity import WorkerKey
from tandem.core.pages import model_salt, next_page_keys, salted
from tandem.rpc.v1.common_pb2 import CachedPages

#: Bytes of a page's key that workers tell.
SHORT = 8
#: Keys that are remembered of pools, and as many of tiers, at some 300 bytes each: with pages of 32 tokens those of 32
#: million.
MOST_KEYS = 1 << 20
#: Pages of a prompt that are foreseen where it is sent; of the others the worker tells when they are there.
MOST_FORESEEN = 256
#: How long workers may take to tell of pages: some intervals between two reports.
TOLD_S = 2.0

Foreseen = Mapping[WorkerKey, Sequence[bytes]]
"""Keys of pages that workers are about to have."""


class KnownPages:
    """Of all workers of one router. Workers of a version that tells nothing hold nothing, as far as is known."""

    def __init__(self) -> None:
        self._index: PageIndex[bytes, WorkerKey] = PageIndex(MOST_KEYS)
        self._stored: PageIndex[bytes, WorkerKey] = PageIndex(MOST_KEYS)
        self._near: PageIndex[bytes, WorkerKey] = PageIndex(MOST_KEYS)  # of those stored
        self._telling: set[WorkerKey] = set()

    def __len__(self) -> int:
        """Different pages that some worker holds in its pool."""
        return len(self._index)

    @property
    def num_stored(self) -> int:
        """Different pages that some worker holds in a tier."""
        return len(self._stored)

    def hear(self, worker: WorkerKey, news: CachedPages) -> None:
        if news.is_first:
            self.lose(worker)
            self._telling.add(worker)
        self._index.add(worker, _split(news.came))
        self._index.remove(worker, _split(news.went))
        self._stored.add(worker, _split(news.tier_came))
        self._stored.remove(worker, _split(news.tier_went))
        self._near.add(worker, _split(news.near_came))
        self._near.remove(worker, _split(news.near_went))

    def lose(self, worker: WorkerKey) -> None:
        """Its stream is over: what it holds from now on is not heard."""
        self._index.drop(worker)
        self._stored.drop(worker)
        self._near.drop(worker)
        self._telling.discard(worker)

    def prefix(self, layout: LayoutId | None, token_ids: Sequence[int], cache_salt: str) -> HeldPrefix[WorkerKey]:
        """Who holds how much of a prompt's beginning, but for its last token, which is computed in any case."""
        if layout is None or not (self._index or self._stored):
            return HeldPrefix()
        keys = tee(_short_keys(layout, token_ids, cache_salt), 3)  # each is made once
        indexes = self._index, self._stored, self._near
        return HeldPrefix(*(index.prefix(own, layout.page_size) for index, own in zip(indexes, keys, strict=True)))

    def foresee(
        self, workers: Iterable[WorkerKey], layout: LayoutId | None, token_ids: Sequence[int], cache_salt: str
    ) -> Foreseen:
        """These are about to have the pages of a prompt."""
        telling = [worker for worker in workers if worker in self._telling]
        if layout is None or not telling:
            return {}
        keys = list(islice(_short_keys(layout, token_ids, cache_salt), MOST_FORESEEN))
        return {worker: self._index.foresee(worker, keys) for worker in telling}

    def forget(self, foreseen: Foreseen) -> None:
        """What was foreseen and not told of is not there."""
        for worker, keys in foreseen.items():
            self._index.forget(worker, keys)


def _short_keys(layout: LayoutId, token_ids: Sequence[int], cache_salt: str) -> Iterator[bytes]:
    salt = salted(model_salt(layout.weights_sha256), cache_salt)
    keys = next_page_keys(token_ids, layout.page_size, salt)
    return (key[:SHORT] for key in islice(keys, (len(token_ids) - 1) // layout.page_size))


def _split(keys: bytes) -> Iterator[bytes]:
    return (keys[start : start + SHORT] for start in range(0, len(keys), SHORT))
