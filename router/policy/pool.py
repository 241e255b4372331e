"""The workers of one role in the orders that a routing decision asks for, kept while their loads change. Pure.

Each order is a sorted list, so the least loaded workers stand in front. With a thousand workers a change costs two
searches and a shift of some kilobytes. Of workers that are equally good each of several routers takes its share first:
so routers that know the same do not all choose the same worker.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from itertools import chain
from typing import Any

from kvtransfer.layout import KvFormat
from router.policy.worker_load import WorkerLoad
from tandem.core.identity import Role, WorkerKey

Rank = tuple[float, ...]
_Entry = tuple[Rank, WorkerKey, WorkerLoad]

_BEHIND_ALL_KEYS = ("\U0010ffff",)


@dataclass(frozen=True, slots=True)
class Share:
    """Which router chooses: the first, the second … of so many."""

    number: int = 0  # below `of`
    of: int = 1


ALONE = Share()
"""Of equals the first one by name."""


class Order(Enum):
    LOAD = "load"  # the least loaded first
    ROOM = "room"  # of decode: the most available pages first
    PROMPTS = "prompts"  # of decode: the fewest prompt tokens in front first
    MIXED = "mixed"  # of decode: who may begin a prompt soonest, of these the quickest; without those that compute none


def prefill_load(load: WorkerLoad) -> Rank:
    """Fewer prompt tokens in front first, then fewer requests."""
    return load.num_queued_tokens, load.num_active


def decode_load(load: WorkerLoad) -> Rank:
    """A smaller batch first, then more free pages."""
    return load.num_active, -load.num_available_pages


def may_compute(load: WorkerLoad) -> bool:
    """Whether a decode worker has time and a place for a prompt now."""
    has_place = not load.max_num_seqs or load.num_stepping < load.max_num_seqs
    return load.prompt_steps.num_tokens > 0 and has_place


def _mixed_rank(load: WorkerLoad) -> Rank | None:
    """Less time for the prompt tokens in front first, then less time for a full step's, then fewer tokens in front."""
    if not may_compute(load):
        return None
    steps = load.prompt_steps
    a_token_s = steps.seconds(steps.num_tokens) / steps.num_tokens
    return a_token_s * load.num_queued_tokens, a_token_s, load.num_queued_tokens


#: The orders of each role, by ranks; a worker without a rank is not in the order.
_RANKS: Mapping[Role, Mapping[Order, Callable[[WorkerLoad], Rank | None]]] = {
    Role.PREFILL: {Order.LOAD: prefill_load},
    Role.DECODE: {
        Order.LOAD: decode_load,
        Order.ROOM: lambda load: (-load.num_available_pages,),
        Order.PROMPTS: prefill_load,
        Order.MIXED: _mixed_rank,
    },
}


class Pool:
    """Workers that may get new requests, by KV format."""

    def __init__(self, role: Role, loads: Iterable[WorkerLoad] = ()) -> None:
        self._ranks = _RANKS[role]
        self._loads: dict[WorkerKey, WorkerLoad] = {}
        # Invariant: a worker stands in the orders of its format by the ranks of its load; no format is without workers.
        self._orders: dict[KvFormat, dict[Order, _Ranking]] = {}
        #: Sums over all workers: requests of other routers, and sequences that their batches hold.
        self.num_others = self.num_places = 0
        for load in loads:
            self.put(load)

    def put(self, load: WorkerLoad) -> None:
        """From now on this worker has this load."""
        before = self._loads.get(load.key)
        if before == load:
            return
        if before is not None and before.kv_format != load.kv_format:
            self.discard(load.key)
            before = None
        orders = self._orders.get(load.kv_format)
        if orders is None:
            orders = self._orders[load.kv_format] = {order: _Ranking() for order in self._ranks}
        self.num_others += load.num_others - (before.num_others if before is not None else 0)
        self.num_places += load.max_num_seqs - (before.max_num_seqs if before is not None else 0)
        self._loads[load.key] = load
        for order, rank_of in self._ranks.items():
            orders[order].move(load, rank_of(before) if before is not None else None, rank_of(load))

    def discard(self, key: WorkerKey) -> None:
        """This worker gets no new requests, if it ever did."""
        load = self._loads.pop(key, None)
        if load is None:
            return
        self.num_others -= load.num_others
        self.num_places -= load.max_num_seqs
        orders = self._orders[load.kv_format]
        for order, rank_of in self._ranks.items():
            orders[order].move(load, rank_of(load), None)
        if not orders[Order.LOAD]:
            del self._orders[load.kv_format]

    # -- for decisions

    def __len__(self) -> int:
        return len(self._loads)

    def __iter__(self) -> Iterator[WorkerLoad]:
        return iter(self._loads.values())

    def find(self, key: WorkerKey | None) -> WorkerLoad | None:
        return self._loads.get(key) if key is not None else None

    @property
    def formats(self) -> Collection[KvFormat]:
        """Those of its workers, in an order that does not depend on who came first."""
        return sorted(self._orders, key=repr) if len(self._orders) > 1 else self._orders.keys()

    def first(self, exclude: Collection[WorkerKey], kv_format: KvFormat | None = None) -> WorkerLoad | None:
        """Any one, of this format if it is given, that is not in `exclude`; `None`: there is none."""
        if kv_format is None:
            return next((load for key, load in self._loads.items() if key not in exclude), None)
        orders = self._orders.get(kv_format)
        entries: Iterable[_Entry] = orders[Order.LOAD] if orders is not None else ()
        return next((load for _, key, load in entries if key not in exclude), None)

    def walk(
        self, order: Order, formats: Collection[KvFormat], share: Share = ALONE, near: float = 0.0
    ) -> Iterator[WorkerLoad]:
        """The workers of these formats that are in the order; of equals first the share.

        Args:
            near: where there are fewer equals than routers, the next ones are equals too whose ranks begin with hardly
                more: by up to so much.
        """
        known = [self._orders[kv_format][order] for kv_format in formats if kv_format in self._orders]
        walks = [ranking.walk(share, near) for ranking in known]
        entries = walks[0] if len(walks) == 1 else heapq.merge(*walks, key=_rank)
        return (load for _, _, load in entries)


def _rank(entry: _Entry) -> Rank:
    return entry[0]


class _Ranking:
    """Workers in the order of their ranks, those of equal rank in that of their keys."""

    def __init__(self) -> None:
        self._entries: list[_Entry] = []

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[_Entry]:
        return iter(self._entries)

    def move(self, load: WorkerLoad, old: Rank | None, new: Rank | None) -> None:
        """From rank `old` to rank `new`; `None`: it was, or is, not in this order."""
        if old is not None:
            place: Any = (old, load.key)  # just before the entry, which goes on
            at = bisect_left(self._entries, place)
            if old == new:
                self._entries[at] = (old, load.key, load)
                return
            del self._entries[at]
        if new is not None:
            insort(self._entries, (new, load.key, load))

    def walk(self, share: Share, near: float = 0.0, start: int = 0, end: int | None = None) -> Iterator[_Entry]:
        """Those from `start` to before `end`; of equals in turn, from the first of the share."""
        entries, end = self._entries, len(self._entries) if end is None else end
        while start < end:
            last: Any = (entries[start][0], _BEHIND_ALL_KEYS)
            behind = bisect_left(entries, last, start, end)
            if near:
                behind = self._behind_near(start, behind, min(end, start + share.of), near)
            first = start + share.number * (behind - start) // share.of
            for at in chain(range(first, behind), range(start, first)):
                yield entries[at]
            start = behind

    def _behind_near(self, start: int, behind: int, end: int, near: float) -> int:
        """Where those end that are hardly worse than the one at `start`; up to `end`."""
        limit = self._entries[start][0][0] + near
        while behind < end and self._entries[behind][0][0] <= limit:
            behind += 1
        return behind
