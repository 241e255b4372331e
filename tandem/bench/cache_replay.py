"""A trace replayed on the router's page index alone: what prefix caches would hold, without a model and a server.

Each worker is a cache of blocks, the least recently used given up first, and a queue that computes prompts at a given
speed in the trace's own time. A request goes where the router's own decision sends it (`router/policy/choose.py`), by
the router's own index (`router/workers/page_index.py`). A prompt's blocks count as held from its placement on, as a
router foresees them. Its queue counts as long as it is until the whole prompt is computed, and answers enter no cache.

A request costs what its blocks cost, whatever the numbers of workers and of requests. Pure.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from kvtransfer.layout import KvFormat, LayoutId
from router.policy.choose import choose_prefill
from router.policy.pool import Pool
from router.policy.prefix import HeldPrefix, KnownPrefix
from router.policy.route import RequestFacts
from router.policy.snapshot import Snapshot
from router.policy.worker_load import WorkerLoad
from router.workers.page_index import PageIndex
from tandem.bench.load.block_names import BlockNames
from tandem.bench.load.trace_entry import TraceEntry
from tandem.core.identity import Role, WorkerKey

_NO_DECODE = WorkerKey("decode", "1")  # whoever it is: all pairs are alike here


@dataclass(frozen=True)
class CacheSpec:
    """The workers.

    Attributes:
        num_blocks: that the cache of one worker has room for; `None`: any number.
        tokens_per_s: of prompts that a worker computes.
        finds_prefixes: requests are placed by what workers hold, not by their queues alone.
    """

    num_workers: int = 1
    num_blocks: int | None = None
    tokens_per_s: float = 10_000.0
    finds_prefixes: bool = True


@dataclass
class WorkerFigures:
    """What one worker got."""

    num_requests: int = 0
    num_computed_tokens: int = 0


@dataclass(frozen=True)
class CacheFigures:
    """What was found. A block is held when all before it in its prompt are held too."""

    num_requests: int
    num_blocks: int
    num_held_blocks: int  # by the worker that got the request
    num_seen_blocks: int  # by the trace's own word: one endless cache would hold them
    num_tokens: int
    num_held_tokens: int
    num_distinct_blocks: int
    num_given_up: int  # blocks that had to make room
    queued_s: tuple[float, ...]  # of each request, in front of its worker; rising
    workers: tuple[WorkerFigures, ...]

    @property
    def hit_ratio(self) -> float:
        """Of all blocks."""
        return self.num_held_blocks / self.num_blocks

    @property
    def possible_ratio(self) -> float:
        """Of all blocks."""
        return self.num_seen_blocks / self.num_blocks

    @property
    def token_ratio(self) -> float:
        """Of all prompt tokens."""
        return self.num_held_tokens / self.num_tokens

    @property
    def imbalance(self) -> float:
        """Tokens that the busiest worker computed over the mean."""
        computed = [worker.num_computed_tokens for worker in self.workers]
        return max(computed) * len(computed) / sum(computed) if sum(computed) else 1.0


def replay(spec: CacheSpec, entries: Iterable[TraceEntry]) -> CacheFigures:
    """All of the entries, which come in the order of their times."""
    world = CacheReplay(spec)
    for entry in entries:
        world.take(entry)
    return world.figures()


class CacheReplay:
    """One replay. Requests come in the order of their times."""

    def __init__(self, spec: CacheSpec) -> None:
        self._spec = spec
        self._names = BlockNames()
        self._index: PageIndex[int, WorkerKey] = PageIndex()
        self._workers = {
            key: _Worker(key) for key in (WorkerKey(f"prefill-{n:04d}", "1") for n in range(spec.num_workers))
        }
        self._prefills = Pool(Role.PREFILL)
        self._snapshot = Snapshot(self._prefills, Pool(Role.DECODE), prefill_tokens_per_s=spec.tokens_per_s)
        self._ends: list[tuple[float, WorkerKey, int]] = []  # of prompts: when, where, and its tokens to compute
        self._num_blocks = self._num_held = self._num_seen = 0
        self._num_tokens = self._num_held_tokens = self._num_given_up = 0
        self._queued_s: list[float] = []
        for worker in self._workers.values():
            self._rank(worker)

    def take(self, entry: TraceEntry) -> WorkerKey:
        """One request comes; where it went. An entry without a time comes at once."""
        now_s = entry.arrival_s or 0.0
        self._let_end(now_s)
        keys, num_seen = self._names.keys(entry.block_ids)
        prefix = self._index.prefix(keys, entry.block_size)
        chosen = self._choose(entry, prefix)
        num_held = prefix.num_pages(chosen.key)
        num_held_tokens = min(entry.num_input, num_held * entry.block_size)
        self._compute(chosen, entry.num_input - num_held_tokens, now_s)
        self._hold(chosen, keys)
        self._num_blocks += len(keys)
        self._num_held += num_held
        self._num_seen += num_seen
        self._num_tokens += entry.num_input
        self._num_held_tokens += num_held_tokens
        return chosen.key

    def figures(self) -> CacheFigures:
        """Of what has come so far."""
        return CacheFigures(
            num_requests=len(self._queued_s),
            num_blocks=self._num_blocks,
            num_held_blocks=self._num_held,
            num_seen_blocks=self._num_seen,
            num_tokens=self._num_tokens,
            num_held_tokens=self._num_held_tokens,
            num_distinct_blocks=len(self._names),
            num_given_up=self._num_given_up,
            queued_s=tuple(sorted(self._queued_s)),
            workers=tuple(replace(worker.figures) for worker in self._workers.values()),
        )

    def _choose(self, entry: TraceEntry, prefix: KnownPrefix[WorkerKey]) -> _Worker:
        facts = RequestFacts(entry.num_input, prefix=HeldPrefix(prefix) if self._spec.finds_prefixes else HeldPrefix())
        return self._workers[choose_prefill(self._snapshot, facts, _NO_DECODE, _FORMAT)]

    def _compute(self, worker: _Worker, num_tokens: int, now_s: float) -> None:
        began_s = max(now_s, worker.free_s)
        worker.free_s = began_s + num_tokens / self._spec.tokens_per_s
        self._queued_s.append(began_s - now_s)
        worker.figures.num_requests += 1
        worker.figures.num_computed_tokens += num_tokens
        worker.num_active += 1
        worker.num_queued_tokens += num_tokens
        heapq.heappush(self._ends, (worker.free_s, worker.key, num_tokens))
        self._rank(worker)

    def _let_end(self, now_s: float) -> None:
        while self._ends and self._ends[0][0] <= now_s:
            _, key, num_tokens = heapq.heappop(self._ends)
            worker = self._workers[key]
            worker.num_active -= 1
            worker.num_queued_tokens -= num_tokens
            self._rank(worker)

    def _rank(self, worker: _Worker) -> None:
        self._prefills.put(WorkerLoad(worker.key, _FORMAT, 1, worker.num_active, worker.num_queued_tokens, 0))

    def _hold(self, worker: _Worker, keys: Sequence[int]) -> None:
        """The blocks are the last ones used, a prompt's first behind its others, so that it outlives them."""
        most, held = self._spec.num_blocks, worker.held
        kept = keys[:most]
        for key in reversed(kept):
            held[key] = None
            held.move_to_end(key)
        gone = [] if most is None else [held.popitem(last=False)[0] for _ in range(len(held) - most)]
        self._num_given_up += len(gone)
        self._index.add(worker.key, kept)
        self._index.remove(worker.key, gone)


class _Worker:
    """A cache and a queue."""

    def __init__(self, key: WorkerKey) -> None:
        self.key = key
        self.held: OrderedDict[int, None] = OrderedDict()  # keys, the least recently used first
        self.free_s = 0.0  # when its queue is empty
        self.num_active = self.num_queued_tokens = 0
        self.figures = WorkerFigures()


# Only that all workers have the same matters.
_FORMAT = KvFormat(LayoutId("w", "float32", num_layers=1, num_kv_heads=1, head_dim=1, page_size=1), "ucx")
