"""The workers that a decision weighs: of each role the best few, whatever the size of its pool. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from itertools import islice

from kvtransfer.layout import KvFormat
from router.policy.costs import (
    batch_cost,
    cost_alone,
    decode_class,
    format_to_pair,
    hardly_more,
    has_room,
    prefill_cost,
    send_cost,
    why_not_alone,
)
from router.policy.pool import Order, Pool, decode_load, prefill_load
from router.policy.route import Candidate, RequestFacts, Route, Wishes
from router.policy.snapshot import Snapshot
from router.policy.worker_load import WorkerLoad
from tandem.core.identity import WorkerKey

# How many of each pool a decision weighs against each other, beyond what their order says: the least loaded.
FEW = 8
# Of each pool that are shown where no prefix is known.
_FEW_SHOWN = 2
# Holders of a prompt's beginning that are looked up: more than are weighed, as they may be of the other role.
_MOST_HOLDERS = 4 * FEW


def best_decodes(
    snapshot: Snapshot, facts: RequestFacts, wishes: Wishes, formats: Sequence[KvFormat], num: int
) -> list[WorkerLoad]:
    """Up to `num` decode workers, the best first: who is wished, then who pairs with the wished prefill worker, then by
    load; those to avoid behind all others."""
    pool, skipped = snapshot.decode, wishes.exclude | wishes.avoid
    found: list[WorkerLoad] = []
    wished = pool.find(wishes.decode)
    if wished is not None and wished.kv_format in formats:
        if wished.key not in skipped:
            found.append(wished)
        skipped = skipped | {wished.key}
    wished_format = format_to_pair(snapshot, wishes)
    for is_off in (False, True):
        group = [f for f in formats if (wished_format is not None and f != wished_format) == is_off]
        if group and len(found) < num:
            found += _by_load(snapshot, facts, group, skipped, num - len(found))
    if len(found) < num and wishes.avoid:
        avoided = (worker for worker in map(pool.find, wishes.avoid - wishes.exclude) if worker is not None)
        able = (worker for worker in avoided if worker.kv_format in formats)
        by_load = sorted(able, key=lambda worker: (decode_load(worker), worker.key))
        found += sorted(by_load, key=lambda worker: decode_class(worker, facts, wishes, wished_format))
    return found[:num]


def _by_load(
    snapshot: Snapshot, facts: RequestFacts, formats: Sequence[KvFormat], skipped: frozenset[WorkerKey], num: int
) -> list[WorkerLoad]:
    """Up to `num` decode workers: those with room for the prompt first, then smaller batches, then more free pages.

    Where the `FEW` with the smallest batches have no room, only the `FEW` with most free pages are looked at, and of
    these the smallest batches come first.
    """
    roomy: list[WorkerLoad] = []
    full: list[WorkerLoad] = []
    for worker in snapshot.decode.walk(Order.LOAD, formats, snapshot.share):
        if worker.key in skipped:
            continue
        (roomy if has_room(worker, facts) else full).append(worker)
        if len(roomy) >= num or len(roomy) + len(full) >= max(num, FEW):
            break
    if not roomy:
        known = (w for w in snapshot.decode.walk(Order.ROOM, formats, snapshot.share) if w.key not in skipped)
        roomy = sorted((w for w in islice(known, FEW) if has_room(w, facts)), key=decode_load)
    return [*roomy, *full][:num]


def best_prefills(snapshot: Snapshot, wishes: Wishes, kv_format: KvFormat, num: int) -> list[WorkerLoad]:
    """Up to `num` prefill workers, the best first: who is wished, then by load; those to avoid behind all others."""
    pool, skipped = snapshot.prefill, wishes.exclude | wishes.avoid
    found: list[WorkerLoad] = []
    wished = pool.find(wishes.prefill)
    if wished is not None and wished.kv_format == kv_format:
        if wished.key not in skipped:
            found.append(wished)
        skipped = skipped | {wished.key}
    if len(found) < num:
        walk = pool.walk(Order.LOAD, [kv_format], snapshot.share, hardly_more(snapshot))
        others = (worker for worker in walk if worker.key not in skipped)
        found += islice(others, num - len(found))
    if len(found) < num and wishes.avoid:
        avoided = (worker for worker in map(pool.find, wishes.avoid - wishes.exclude) if worker is not None)
        able = (worker for worker in avoided if worker.kv_format == kv_format)
        found += sorted(able, key=lambda worker: (worker.key != wishes.prefill, prefill_load(worker), worker.key))
    return found[:num]


def best_alone(snapshot: Snapshot, facts: RequestFacts, wishes: Wishes, num: int) -> list[WorkerLoad]:
    """Decode workers that may compute a prompt by themselves, at least one of those that are not excluded: up to `num`
    with the fewest prompt tokens in front, the one with most room, and the holders of the longest beginnings; only
    where there are none, those to avoid."""
    pool, skipped = snapshot.decode, wishes.exclude | wishes.avoid
    walk = pool.walk(Order.PROMPTS, pool.formats, snapshot.share, hardly_more(snapshot))
    found = list(islice((worker for worker in walk if worker.key not in skipped), num))
    if not found:
        avoided = (pool.find(key) for key in sorted(wishes.avoid - wishes.exclude))
        return sorted((worker for worker in avoided if worker is not None), key=prefill_load)
    by_room = pool.walk(Order.ROOM, pool.formats, snapshot.share)
    roomiest = next(worker for worker in by_room if worker.key not in skipped)
    if roomiest not in found:
        found.append(roomiest)
    return with_holders(pool, facts, wishes, found, pool.formats)


def with_holders(
    pool: Pool, facts: RequestFacts, wishes: Wishes, few: list[WorkerLoad], formats: Collection[KvFormat]
) -> list[WorkerLoad]:
    """`few`, and those of the longest beginnings that are not among them."""
    known = {worker.key for worker in few} | wishes.exclude | wishes.avoid
    found = (pool.find(holder) for holder in facts.prefix.longest(_MOST_HOLDERS) if holder not in known)
    return few + list(islice((w for w in found if w is not None and w.kv_format in formats), FEW))


def best_pairs(
    snapshot: Snapshot, facts: RequestFacts, wishes: Wishes, formats: Sequence[KvFormat], num: int
) -> Iterator[tuple[WorkerLoad, WorkerLoad]]:
    """The best decode workers, each with the best prefill workers."""
    prefills = {kv_format: best_prefills(snapshot, wishes, kv_format, num) for kv_format in formats}
    for decode in best_decodes(snapshot, facts, wishes, formats, num):
        for prefill in prefills[decode.kv_format]:
            yield prefill, decode


# --- for people ---------------------------------------------------------------------------------------------------


def least_loaded(snapshot: Snapshot, facts: RequestFacts, route: Route) -> tuple[Candidate, ...]:
    """Those that were chosen, and of each pool the least loaded: what others would have cost."""
    prefills = _shown(snapshot.prefill, snapshot, route.prefill)
    decodes = [] if facts.pools else _shown(snapshot.decode, snapshot, route.decode)
    smallest = min((decode.num_active for decode in decodes), default=0)
    of_prefill = [prompt_candidate(facts, p, prefill_cost(snapshot, facts, p)) for p in prefills]
    of_decode = [
        decode_candidate(facts, d, batch_cost(facts, d, smallest), cost_alone(snapshot, facts, d)) for d in decodes
    ]
    return (*of_prefill, *of_decode)


def _shown(pool: Pool, snapshot: Snapshot, chosen: WorkerKey | None) -> list[WorkerLoad]:
    few = list(islice(pool.walk(Order.LOAD, pool.formats, snapshot.share), _FEW_SHOWN))
    found = pool.find(chosen)
    return few if found is None or found in few else [found, *few]


def prompt_candidate(facts: RequestFacts, worker: WorkerLoad, cost: float) -> Candidate:
    """A worker that would compute the prompt."""
    held, stored = facts.prefix.num_ready(worker.key), facts.prefix.num_stored(worker.key)
    return Candidate(worker.key, held, worker.num_queued_tokens, worker.num_active, cost, num_stored_tokens=stored)


def decode_candidate(facts: RequestFacts, worker: WorkerLoad, batch: float, alone: float) -> Candidate:
    """`batch`, `alone`: what its batch costs, and what the prompt does if it computes that by itself."""
    return Candidate(
        worker.key,
        facts.prefix.num_ready(worker.key),
        worker.num_queued_tokens,
        worker.num_active,
        cost=batch + send_cost(facts, worker),
        cost_alone=alone + batch if alone < math.inf else None,
        num_stored_tokens=facts.prefix.num_stored(worker.key),
        why_not_alone=why_not_alone(facts, worker, facts.num_prompt_tokens - facts.prefix.num_ready(worker.key)),
        prompt_steps=worker.prompt_steps,
    )
