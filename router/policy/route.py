"""Decides which workers serve a request and which one computes its prompt: one pure decision over ordered pools.

Prefill is bound by compute, so the waiting prompt tokens tell how long a new prompt waits there. Decode is bound by
pages and by the size of its batch. Both workers of a pair must have the same KV format. A decision looks at the first
few of each pool's order, whatever the size of the pool.

**Ways between workers.** A pair that is known to be broken is chosen only where there is no other, whatever is wished.
Where a way is slower than prefill computes, the tokens that could be computed meanwhile count as if they waited.

**Prefixes that are held.** Of a prompt that begins with pages which some workers hold, only the rest is to compute, or
to send. Then the holders of the longest beginnings are weighed beside the least loaded workers, and the way of the
least cost is taken: what waits in front, what is to compute, what is still to send, and the batch, all in prompt tokens
that a prefill worker could compute meanwhile. So a holder that is busy loses against one that computes all of it anew.

**The mixed pool.** A decode step mostly reads the weights, so some prompt tokens in it cost little more. A decode
worker can compute a whole prompt in chunks that fill its steps up to `mixed_step_tokens`
(`tandem/worker/scheduler.py`), though slower than a prefill worker. A new prompt goes there where it is ready sooner.
Reference: the mixed pool of Patel et al., "Splitwise", ISCA 2024; here the workers keep their roles.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import islice

from kvtransfer.layout import KvFormat, mismatch
from router.policy.pool import Order, Pool, decode_load, mixed_slowness, prefill_load
from router.policy.prefix import KnownPrefix
from router.policy.snapshot import Snapshot
from router.policy.worker_load import WorkerLoad
from tandem.core.errors import IncompatibleError, NoWorkerError
from tandem.core.identity import Role, WorkerKey
from tandem.core.pages import pages_for

# What a prompt token costs in a decode step, relative to one in a prefill worker's chunk. With a lower factor decode
# would take prompts from a prefill worker that will have time for them soon.
_SMALL_STEP_COST = 1.2
# How many of each pool a decision weighs against each other, beyond what their order says: the least loaded.
_FEW = 8
# Of each pool that are shown where no prefix is known.
_FEW_SHOWN = 2
# By what share of a prompt's computation its pages may come later than it ends before another pair is looked for.
_NOTABLE = 0.25
# Holders of a prompt's beginning that are looked up: more than are weighed, as they may be of the other role.
_MOST_HOLDERS = 4 * _FEW
# What it costs to send a token's pages, relative to its computation, where nothing is known of the way: little.
_SENT_COST = 0.05
# Prompt tokens that one more sequence in decode's batch is worth: its rows make the steps of all others longer.
_ROW_COST = 16.0

# A prefill worker that is idle so soon is as good as one that other routers may choose at the same time.
_HARDLY_S = 0.05


@dataclass(frozen=True, slots=True)
class RequestFacts:
    """What a routing decision knows of a request.

    Attributes:
        priority: urgent where below 0.
        prefix: who holds how much of the prompt's beginning, as far as is known.
        deadline_s: when its client gives up, on the router's clock; `None` where it does not.
        num_held_tokens: of prompts that wait in this router for their turn, behind this one.
        mixed_pool_tokens: the longest prompt of the mixed pool; longer ones would slow the other sequences for long.
        pools: a prefill worker serves it alone.
    """

    num_prompt_tokens: int
    priority: int = 0
    prefix: KnownPrefix[WorkerKey] = field(default_factory=KnownPrefix)
    deadline_s: float | None = None
    num_held_tokens: int = 0
    mixed_pool_tokens: int = 0
    is_first_attempt: bool = True
    pools: bool = False


@dataclass(frozen=True, slots=True)
class Wishes:
    """Which workers recovery wants for the next attempt.

    Attributes:
        prefill: holds pages of the request; it is chosen where it is ready and has a partner.
        decode: as `prefill`.
        max_local_tokens: if above 0, `decode` alone is asked first and may compute so many tokens by itself. A prefill
            worker is chosen when decode says that it needs one.
        avoid: chosen only where there is no other.
        exclude: never chosen, because they are gone or leaving.
    """

    prefill: WorkerKey | None = None
    decode: WorkerKey | None = None
    max_local_tokens: int = 0
    avoid: frozenset[WorkerKey] = frozenset()
    exclude: frozenset[WorkerKey] = frozenset()


class Why(StrEnum):
    LOAD = "load"  # the pair that has least to do
    KEPT = "kept"  # it holds pages of the request
    MIXED_POOL = "mixed_pool"  # a decode worker computes the prompt sooner
    PREFIX = "prefix"  # the prompt begins with pages that are held there


@dataclass(frozen=True, slots=True)
class Candidate:
    """One worker that a decision weighed, for people. All figures are in prompt tokens.

    Attributes:
        num_held_tokens: of the prompt, in its cache as far as is known.
        num_tokens_in_front: to be computed before the prompt.
        cost: what decides; of a decode worker that of its batch, and of the pages that are to be sent there.
        cost_alone: of a decode worker that computes the prompt by itself, all in all; `None`: it may not.
    """

    worker: WorkerKey
    num_held_tokens: int
    num_tokens_in_front: int
    num_active: int
    cost: float
    cost_alone: float | None = None


@dataclass(frozen=True, slots=True)
class Route:
    """`prefill` is `None` where decode is asked first; it may compute up to `max_local_tokens` by itself. `decode` is
    `None` where the prompt is pooled."""

    prefill: WorkerKey | None
    decode: WorkerKey | None
    max_local_tokens: int
    why: Why
    weighed: tuple[Candidate, ...] = field(default=(), compare=False)  # for people, of each role some


ANY = Wishes()


def choose(snapshot: Snapshot, facts: RequestFacts, wishes: Wishes = ANY) -> Route:
    """The least loaded workers for a request, as far as `wishes` allow.

    Raises:
        NoWorkerError: a pool is empty; names it.
        IncompatibleError: no prefill worker has the format of a decode worker; names who and what differs.
    """
    route = _choose(snapshot, facts, wishes)
    return route if route.weighed else replace(route, weighed=_least_loaded(snapshot, facts, route))


def _choose(snapshot: Snapshot, facts: RequestFacts, wishes: Wishes) -> Route:
    if facts.pools:
        return Route(_for_pooling(snapshot, wishes).key, None, 0, Why.LOAD)
    if wishes.max_local_tokens and (asked := snapshot.decode.find(wishes.decode)) is not None:
        return Route(None, asked.key, wishes.max_local_tokens, Why.KEPT)
    alone = _computes_alone(snapshot, facts)
    if facts.prefix and wishes.prefill is None and wishes.decode is None:
        found = _cheapest(snapshot, facts, wishes, _pairable(snapshot, wishes), alone)
        if found is not None:
            return found
    if alone is not None:
        return Route(None, alone, facts.num_prompt_tokens, Why.MIXED_POOL)
    formats = _pairable(snapshot, wishes)
    if snapshot.links:
        prefill, decode = _best_pair(snapshot, facts, wishes, formats)
    else:
        (decode,) = _decodes(snapshot, facts, wishes, formats, 1)
        (prefill,) = _prefills(snapshot, wishes, decode.kv_format, 1)
    is_kept = decode.key == wishes.decode or prefill.key == wishes.prefill
    return Route(prefill.key, decode.key, 0, Why.KEPT if is_kept else Why.LOAD)


def _least_loaded(snapshot: Snapshot, facts: RequestFacts, route: Route) -> tuple[Candidate, ...]:
    """Those that were chosen, and of each pool the least loaded: what others would have cost."""
    prefills = _shown(snapshot.prefill, snapshot, route.prefill)
    decodes = [] if facts.pools else _shown(snapshot.decode, snapshot, route.decode)
    smallest = min((decode.num_active for decode in decodes), default=0)
    of_prefill = [_prefill_candidate(facts, p, _prefill_cost(facts, p)) for p in prefills]
    of_decode = [_decode_candidate(facts, d, _batch_cost(facts, d, smallest), _cost_alone(facts, d)) for d in decodes]
    return (*of_prefill, *of_decode)


def _shown(pool: Pool, snapshot: Snapshot, chosen: WorkerKey | None) -> list[WorkerLoad]:
    few = list(islice(pool.walk(Order.LOAD, pool.formats, snapshot.share), _FEW_SHOWN))
    found = pool.find(chosen)
    return few if found is None or found in few else [found, *few]


def _prefill_candidate(facts: RequestFacts, worker: WorkerLoad, cost: float) -> Candidate:
    held = facts.prefix.num_tokens(worker.key)
    return Candidate(worker.key, held, worker.num_queued_tokens, worker.num_active, cost)


def _decode_candidate(facts: RequestFacts, worker: WorkerLoad, batch: float, alone: float) -> Candidate:
    """`batch`, `alone`: what its batch costs, and what the prompt does if it computes that by itself."""
    return Candidate(
        worker.key,
        facts.prefix.num_tokens(worker.key),
        worker.num_queued_tokens,
        worker.num_active,
        cost=batch + _send_cost(facts, worker),
        cost_alone=alone + batch if alone < math.inf else None,
    )


def choose_prefill(
    snapshot: Snapshot, facts: RequestFacts, decode: WorkerKey, kv_format: KvFormat, wishes: Wishes = ANY
) -> WorkerKey:
    """The least loaded prefill worker for a decode worker that has granted pages. Raises as `choose` does."""
    anyone = _taken(Role.PREFILL, snapshot.prefill, wishes)
    if snapshot.prefill.first(wishes.exclude, kv_format) is None:
        raise _incompatible(anyone, decode, kv_format)
    if facts.prefix and wishes.prefill is None:
        able = _with_holders(snapshot.prefill, facts, wishes, _prefills(snapshot, wishes, kv_format, _FEW), [kv_format])
        whole = [prefill for prefill in able if not _is_broken(snapshot, prefill.key, decode)] or able
        return min(whole, key=lambda p: _prefill_cost(facts, p) + _exposed_tokens(snapshot, facts, p, decode)).key
    if not snapshot.links:
        return _prefills(snapshot, wishes, kv_format, 1)[0].key
    even = _even(snapshot, [kv_format])
    for num in (_FEW, len(snapshot.prefill)):
        few = _prefills(snapshot, wishes, kv_format, num)
        best = min(few, key=lambda prefill: _prefill_rank(snapshot, facts, wishes, prefill, decode, even))
        if not _is_broken(snapshot, best.key, decode):
            break
    return best.key


def check_ready(snapshot: Snapshot, *, pools: bool = False) -> None:
    """Raises as `choose` does unless a request could be placed: both pools have a ready worker, and two pair. One that
    `pools` needs a prefill worker alone."""
    if pools:
        _taken(Role.PREFILL, snapshot.prefill, ANY)
    else:
        _pairable(snapshot, ANY)


def check_placeable(snapshot: Snapshot, *, pools: bool = False) -> None:
    """Raises as `choose` does unless a request can be placed now, or when a worker that is coming is there."""
    if not snapshot.may_get_better(pools=pools):
        check_ready(snapshot, pools=pools)


# --- who can ------------------------------------------------------------------------------------------------------


def _taken(role: Role, pool: Pool, wishes: Wishes) -> WorkerLoad:
    """One that is not excluded."""
    if (anyone := pool.first(wishes.exclude)) is None:
        raise NoWorkerError(f"no {role} worker is ready; try again later")
    return anyone


def _pairable(snapshot: Snapshot, wishes: Wishes) -> list[KvFormat]:
    """The formats that both pools have; at least one."""
    prefill = _taken(Role.PREFILL, snapshot.prefill, wishes)
    decode = _taken(Role.DECODE, snapshot.decode, wishes)
    pools = snapshot.prefill, snapshot.decode
    formats = [f for f in snapshot.decode.formats if all(pool.first(wishes.exclude, f) for pool in pools)]
    if not formats:
        raise _incompatible(prefill, decode.key, decode.kv_format)
    return formats


def _incompatible(prefill: WorkerLoad, decode: WorkerKey, kv_format: KvFormat) -> IncompatibleError:
    """Names one pair, which is enough to act on; `GET /v1/cluster` has all of them."""
    differing = mismatch(prefill.kv_format, str(prefill.key), kv_format, str(decode))
    return IncompatibleError(
        f"no prefill worker can pair with a decode worker: {'; '.join(differing)} (see GET /v1/cluster)"
    )


# --- prefill alone ------------------------------------------------------------------------------------------------


def _for_pooling(snapshot: Snapshot, wishes: Wishes) -> WorkerLoad:
    """The least loaded prefill worker, whatever its format: its pages go nowhere."""
    _taken(Role.PREFILL, snapshot.prefill, wishes)
    formats = [f for f in snapshot.prefill.formats if snapshot.prefill.first(wishes.exclude, f)]
    best = [_prefills(snapshot, wishes, kv_format, 1)[0] for kv_format in formats]
    return min(best, key=lambda worker: (worker.key in wishes.avoid, prefill_load(worker)))


# --- decode alone -------------------------------------------------------------------------------------------------


def _computes_alone(snapshot: Snapshot, facts: RequestFacts) -> WorkerKey | None:
    """The decode worker that would have a new prompt computed before any prefill worker; `None`: hand it off.

    Only workers with a KV format that both pools have count, because only they could take part in a handoff.
    """
    may_be_slow = facts.is_first_attempt and facts.priority >= 0
    if not may_be_slow or not 0 < facts.num_prompt_tokens <= facts.mixed_pool_tokens:
        return None
    with_prefill = snapshot.prefill.formats
    formats = [kv_format for kv_format in snapshot.decode.formats if kv_format in with_prefill]
    if not formats:
        return None
    shortest = next(snapshot.prefill.walk(Order.LOAD, formats)).num_queued_tokens
    # What decode computes, those that wait here have less in front of them.
    held = facts.num_held_tokens * snapshot.share.of / len(snapshot.prefill)
    best, cost = None, shortest + held + facts.num_prompt_tokens
    for kv_format in formats:
        found, cost = _quickest(snapshot, facts, kv_format, cost)
        best = found or best
    return best


def _quickest(
    snapshot: Snapshot, facts: RequestFacts, kv_format: KvFormat, most: float
) -> tuple[WorkerKey | None, float]:
    """The decode worker of this format that has the prompt computed soonest, if at a cost below `most`; that cost."""
    best = None
    for group in snapshot.decode.groups(Order.MIXED, kv_format, snapshot.share):  # of equal slowness each
        for worker in islice(group, _FEW):
            slowness = _SMALL_STEP_COST * mixed_slowness(worker)
            if slowness * facts.num_prompt_tokens >= most:
                return best, most  # and so are all behind it
            if _has_room(worker, facts):
                cost = slowness * (worker.num_queued_tokens + facts.num_prompt_tokens)
                best, most = (worker.key, cost) if cost < most else (best, most)
                break  # those behind it in the group have more to compute
    return best, most


# --- the best few of each role ------------------------------------------------------------------------------------


def _decodes(
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
    wished_format = _wished_format(snapshot, wishes)
    for is_off in (False, True):
        group = [f for f in formats if (wished_format is not None and f != wished_format) == is_off]
        if group and len(found) < num:
            found += _by_load(snapshot, facts, group, skipped, num - len(found))
    if len(found) < num and wishes.avoid:
        avoided = (worker for worker in map(pool.find, wishes.avoid - wishes.exclude) if worker is not None)
        able = (worker for worker in avoided if worker.kv_format in formats)
        by_load = sorted(able, key=lambda worker: (decode_load(worker), worker.key))
        found += sorted(by_load, key=lambda worker: _decode_class(worker, facts, wishes, wished_format))
    return found[:num]


def _by_load(
    snapshot: Snapshot, facts: RequestFacts, formats: Sequence[KvFormat], skipped: frozenset[WorkerKey], num: int
) -> list[WorkerLoad]:
    """Up to `num` decode workers: those with room for the prompt first, then smaller batches, then more free pages.

    Where the `_FEW` with the smallest batches have no room, only the `_FEW` with most free pages are looked at, and of
    these the smallest batches come first.
    """
    roomy: list[WorkerLoad] = []
    full: list[WorkerLoad] = []
    for worker in snapshot.decode.walk(Order.LOAD, formats, snapshot.share):
        if worker.key in skipped:
            continue
        (roomy if _has_room(worker, facts) else full).append(worker)
        if len(roomy) >= num or len(roomy) + len(full) >= max(num, _FEW):
            break
    if not roomy:
        known = (w for w in snapshot.decode.walk(Order.ROOM, formats, snapshot.share) if w.key not in skipped)
        roomy = sorted((w for w in islice(known, _FEW) if _has_room(w, facts)), key=decode_load)
    return [*roomy, *full][:num]


def _prefills(snapshot: Snapshot, wishes: Wishes, kv_format: KvFormat, num: int) -> list[WorkerLoad]:
    """Up to `num` prefill workers, the best first: who is wished, then by load; those to avoid behind all others."""
    pool, skipped = snapshot.prefill, wishes.exclude | wishes.avoid
    found: list[WorkerLoad] = []
    wished = pool.find(wishes.prefill)
    if wished is not None and wished.kv_format == kv_format:
        if wished.key not in skipped:
            found.append(wished)
        skipped = skipped | {wished.key}
    if len(found) < num:
        walk = pool.walk(Order.LOAD, [kv_format], snapshot.share, _near(snapshot))
        others = (worker for worker in walk if worker.key not in skipped)
        found += islice(others, num - len(found))
    if len(found) < num and wishes.avoid:
        avoided = (worker for worker in map(pool.find, wishes.avoid - wishes.exclude) if worker is not None)
        able = (worker for worker in avoided if worker.kv_format == kv_format)
        found += sorted(able, key=lambda worker: (worker.key != wishes.prefill, prefill_load(worker), worker.key))
    return found[:num]


def _near(snapshot: Snapshot) -> float:
    """Up to how many more prompt tokens in front are hardly more: to one router, which knows who is idle, any are."""
    return _HARDLY_S * snapshot.prefill_tokens_per_s if snapshot.share.of > 1 else 0.0


# --- where the prompt begins with pages that are held -------------------------------------------------------------


def _cheapest(
    snapshot: Snapshot, facts: RequestFacts, wishes: Wishes, formats: Sequence[KvFormat], alone: WorkerKey | None
) -> Route | None:
    """The way of the least cost among the least loaded workers and those that hold most of the prompt; `None`: no way
    between these works."""
    decodes = _decodes(snapshot, facts, wishes, formats, _FEW)
    if (quickest := snapshot.decode.find(alone)) is not None and quickest not in decodes:
        decodes.append(quickest)
    decodes = _with_holders(snapshot.decode, facts, wishes, decodes, formats)
    prefills = [
        prefill
        for kv_format in formats
        for prefill in _with_holders(
            snapshot.prefill, facts, wishes, _prefills(snapshot, wishes, kv_format, _FEW), [kv_format]
        )
    ]
    smallest = min(decode.num_active for decode in decodes)
    prefill_costs = {p.key: _prefill_cost(facts, p) for p in prefills}
    batch_costs = {d.key: _batch_cost(facts, d, smallest) for d in decodes}
    decode_costs = {d.key: batch_costs[d.key] + _send_cost(facts, d) for d in decodes}
    alone_costs = {d.key: _cost_alone(facts, d) for d in decodes}

    def cost(prefill: WorkerLoad, decode: WorkerLoad) -> tuple[float, ...]:
        exposed = _exposed_tokens(snapshot, facts, prefill, decode.key)
        total = prefill_costs[prefill.key] + decode_costs[decode.key] + exposed
        avoided = (prefill.key in wishes.avoid) + (decode.key in wishes.avoid)
        return _is_broken(snapshot, prefill.key, decode.key), avoided, total

    # Without what is known of ways a pair costs the sum of its two; so the best few of each role suffice.
    prefills.sort(key=lambda p: (p.key in wishes.avoid, prefill_costs[p.key]))
    by_cost = sorted(decodes, key=lambda d: (d.key in wishes.avoid, decode_costs[d.key]))
    pairs = [(p, d) for d in by_cost for p in prefills if p.kv_format == d.kv_format]
    best = min(pairs if snapshot.links else pairs[:1], key=lambda pair: cost(*pair))
    of_prefill = [_prefill_candidate(facts, p, prefill_costs[p.key]) for p in prefills]
    of_decode = [_decode_candidate(facts, d, batch_costs[d.key], alone_costs[d.key]) for d in by_cost]
    weighed = (*of_prefill, *of_decode)
    lone = min(decodes, key=lambda d: (d.key in wishes.avoid, alone_costs[d.key] + batch_costs[d.key]))
    lone_cost = alone_costs[lone.key] + batch_costs[lone.key]
    if lone_cost < math.inf and (False, lone.key in wishes.avoid, lone_cost) < cost(*best):
        is_held = facts.prefix.num_tokens(lone.key) > 0
        most = facts.mixed_pool_tokens if is_held else facts.num_prompt_tokens
        return Route(None, lone.key, most, Why.PREFIX if is_held else Why.MIXED_POOL, weighed)
    if _is_broken(snapshot, best[0].key, best[1].key):
        return None
    is_held = any(facts.prefix.num_tokens(worker.key) for worker in best)
    return Route(best[0].key, best[1].key, 0, Why.PREFIX if is_held else Why.LOAD, weighed)


def _with_holders(
    pool: Pool, facts: RequestFacts, wishes: Wishes, few: list[WorkerLoad], formats: Sequence[KvFormat]
) -> list[WorkerLoad]:
    """`few`, and those of the longest beginnings that are not among them."""
    known = {worker.key for worker in few} | wishes.exclude | wishes.avoid
    found = (pool.find(holder) for holder in facts.prefix.longest(_MOST_HOLDERS) if holder not in known)
    return few + list(islice((w for w in found if w is not None and w.kv_format in formats), _FEW))


def _prefill_cost(facts: RequestFacts, worker: WorkerLoad) -> float:
    """Prompt tokens that are computed before the prompt is."""
    return worker.num_queued_tokens + facts.num_prompt_tokens - facts.prefix.num_tokens(worker.key)


def _send_cost(facts: RequestFacts, worker: WorkerLoad) -> float:
    """Of the pages that it does not hold."""
    return _SENT_COST * (facts.num_prompt_tokens - facts.prefix.num_tokens(worker.key))


def _batch_cost(facts: RequestFacts, worker: WorkerLoad, smallest: int) -> float:
    """What its batch costs beside the smallest one; and what it lacks room for, which has to be waited for."""
    crowd = _ROW_COST * (worker.num_active - smallest)
    return crowd if _has_room(worker, facts) else crowd + facts.num_prompt_tokens


def _cost_alone(facts: RequestFacts, worker: WorkerLoad) -> float:
    """Of what the worker does not hold, computed in its own steps; endless where it may not be."""
    num_left = facts.num_prompt_tokens - facts.prefix.num_tokens(worker.key)
    may_be_slow = facts.is_first_attempt and facts.priority >= 0
    if not may_be_slow or num_left > facts.mixed_pool_tokens or not _has_room(worker, facts):
        return math.inf
    return _SMALL_STEP_COST * mixed_slowness(worker) * (worker.num_queued_tokens + num_left)


# --- two that go well together ------------------------------------------------------------------------------------


def _best_pair(
    snapshot: Snapshot, facts: RequestFacts, wishes: Wishes, formats: Sequence[KvFormat]
) -> tuple[WorkerLoad, WorkerLoad]:
    """The prefill and the decode worker, where something is known of the ways between some."""
    wished_format, even = _wished_format(snapshot, wishes), _even(snapshot, formats)

    def rank(pair: tuple[WorkerLoad, WorkerLoad]) -> tuple[float, ...]:
        prefill, decode = pair
        of_prefill = _prefill_rank(snapshot, facts, wishes, prefill, decode.key, even)
        is_broken, *others = of_prefill
        return (is_broken, *_decode_class(decode, facts, wishes, wished_format), *others)

    best = min(_pairs(snapshot, facts, wishes, formats, _FEW), key=rank)
    if _is_broken(snapshot, best[0].key, best[1].key):  # as are all of the few: the best of all that is not
        everyone = _pairs(snapshot, facts, wishes, formats, len(snapshot.prefill) + len(snapshot.decode))
        return next((pair for pair in everyone if not _is_broken(snapshot, pair[0].key, pair[1].key)), best)
    return best


def _pairs(
    snapshot: Snapshot, facts: RequestFacts, wishes: Wishes, formats: Sequence[KvFormat], num: int
) -> Iterator[tuple[WorkerLoad, WorkerLoad]]:
    """The best decode workers, each with the best prefill workers."""
    prefills = {kv_format: _prefills(snapshot, wishes, kv_format, num) for kv_format in formats}
    for decode in _decodes(snapshot, facts, wishes, formats, num):
        for prefill in prefills[decode.kv_format]:
            yield prefill, decode


def _is_broken(snapshot: Snapshot, prefill: WorkerKey, decode: WorkerKey) -> bool:
    link = snapshot.links.get((prefill, decode))
    return link is not None and link.is_broken


def _even(snapshot: Snapshot, formats: Sequence[KvFormat]) -> float:
    """Up to how many prompt tokens in front a prefill worker is as good as the least loaded one of these formats."""
    return next(snapshot.prefill.walk(Order.LOAD, formats)).num_queued_tokens + _near(snapshot)


def _prefill_rank(
    snapshot: Snapshot, facts: RequestFacts, wishes: Wishes, prefill: WorkerLoad, decode: WorkerKey, even: float
) -> tuple[float, ...]:
    """For this decode worker: a way that works, then wishes, then fewer prompt tokens until all pages are there."""
    delay = max(even, prefill.num_queued_tokens + _exposed_tokens(snapshot, facts, prefill, decode))
    is_broken = _is_broken(snapshot, prefill.key, decode)
    return is_broken, prefill.key in wishes.avoid, prefill.key != wishes.prefill, delay


def _exposed_tokens(snapshot: Snapshot, facts: RequestFacts, prefill: WorkerLoad, decode: WorkerKey) -> float:
    """How many prompt tokens a prefill worker computes while a handoff goes on after the prompt's own computation.

    Pages travel while the prompt is computed, so only a way that is slower than the computation counts; and only where
    it is so by more than its share of `_NOTABLE`, as else the batches matter more.
    """
    link = snapshot.links.get((prefill.key, decode))
    if link is None or not snapshot.prefill_tokens_per_s:
        return 0.0
    try:
        token_bytes = prefill.kv_format.layout.token_bytes
    except IncompatibleError:  # elements of a later version: how long they take is not known
        return 0.0
    num_missing = facts.num_prompt_tokens - facts.prefix.num_tokens(decode)
    num_computed = facts.num_prompt_tokens - facts.prefix.num_tokens(prefill.key)
    handoff_s = num_missing * token_bytes / max(link.bytes_per_s, 1.0)
    exposed = handoff_s * snapshot.prefill_tokens_per_s - num_computed
    return exposed if exposed > _NOTABLE * facts.num_prompt_tokens else 0.0


# --- what it costs ------------------------------------------------------------------------------------------------


def _wished_format(snapshot: Snapshot, wishes: Wishes) -> KvFormat | None:
    """That of the wished prefill worker, which is to find a partner."""
    wished = snapshot.prefill.find(wishes.prefill)
    return wished.kv_format if wished is not None and wished.key not in wishes.exclude else None


def _decode_class(
    worker: WorkerLoad, facts: RequestFacts, wishes: Wishes, wished_format: KvFormat | None
) -> tuple[bool, bool, bool, bool]:
    """What counts before its load."""
    is_off = wished_format is not None and worker.kv_format != wished_format
    return worker.key in wishes.avoid, worker.key != wishes.decode, is_off, not _has_room(worker, facts)


def _has_room(worker: WorkerLoad, facts: RequestFacts) -> bool:
    return pages_for(facts.num_prompt_tokens, worker.page_size) <= worker.num_available_pages
