"""Decides which workers serve a request and which one computes its prompt: one pure decision over ordered pools.

Prefill is bound by compute, so the waiting prompt tokens tell how long a new prompt waits there. Decode is bound by
pages and by the size of its batch. Both workers of a pair must have the same KV format. A decision looks at the first
few of each pool's order, whatever the size of the pool.

**Ways between workers.** A pair that is known to be broken is chosen only where there is no other, whatever is wished.
Where a way is slower than prefill computes, the tokens that could be computed meanwhile count as if they waited.

**Prefixes that are held.** Of a prompt that begins with pages which some workers hold, only the rest is to compute, or
to send. Then the holders of the longest beginnings are weighed beside the least loaded workers, and the way of the
least cost is taken: what waits in front, what is to compute, what is still to send, and the batch, all in prompt tokens
that a prefill worker could compute meanwhile. What a worker holds below its pool is to be read, at its own price. So a
holder that is busy loses against one that computes all of it anew.

**The mixed pool.** A decode step mostly reads the weights, so prompt tokens in it cost less than in one of their own. A
decode worker can compute a whole prompt in chunks that leave those who generate the time per token that they want
(`tandem/worker/scheduler.py`), and says how many tokens that is and what they take. A new prompt goes there where it is
ready sooner; and, since it needs no handoff, where it is ready as soon at one that nobody is at. Reference: the mixed
pool of Patel et al., "Splitwise", ISCA 2024; here the workers keep their roles.

**Colocated.** A cluster without prefill workers places each prompt whole at the decode worker that has it computed
soonest: prompt tokens in front, what it does not hold of the prompt, and what its batch costs. There is no bound.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice

from kvtransfer.layout import KvFormat, mismatch
from router.policy.candidates import (
    FEW,
    best_alone,
    best_decodes,
    best_pairs,
    best_prefills,
    decode_candidate,
    least_loaded,
    prompt_candidate,
    with_holders,
)
from router.policy.costs import (
    batch_cost,
    beside_pairs,
    cost_alone,
    decode_class,
    delay_behind,
    delay_beside,
    even_load,
    exposed_tokens,
    format_to_pair,
    has_room,
    is_late,
    is_way_broken,
    may_be_slow,
    own_cost,
    prefill_cost,
    prefill_rank,
    send_cost,
    steps_cost,
)
from router.policy.pool import Order, Pool, prefill_load
from router.policy.route import ANY, RequestFacts, Route, Why, Wishes
from router.policy.snapshot import Snapshot
from router.policy.worker_load import WorkerLoad
from tandem.core.errors import IncompatibleError, NoWorkerError
from tandem.core.identity import Role, WorkerKey

# Where more of a held beginning has gone than makes decode compute so many times what was weighed, it is handed off.
_MOST_GONE = 2


def choose(snapshot: Snapshot, facts: RequestFacts, wishes: Wishes = ANY) -> Route:
    """The least loaded workers for a request, as far as `wishes` allow.

    Raises:
        NoWorkerError: a pool is empty that the request needs; names it.
        IncompatibleError: no prefill worker has the format of a decode worker; names who and what differs.
    """
    route = _choose(snapshot, facts, wishes)
    return route if route.weighed else replace(route, weighed=least_loaded(snapshot, facts, route))


def _choose(snapshot: Snapshot, facts: RequestFacts, wishes: Wishes) -> Route:
    if facts.pools:
        return Route(_for_pooling(snapshot, wishes).key, None, 0, Why.LOAD)
    if snapshot.is_colocated:
        return _colocated(snapshot, facts, wishes)
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
        (decode,) = best_decodes(snapshot, facts, wishes, formats, 1)
        (prefill,) = best_prefills(snapshot, wishes, decode.kv_format, 1)
    is_kept = decode.key == wishes.decode or prefill.key == wishes.prefill
    return Route(prefill.key, decode.key, 0, Why.KEPT if is_kept else Why.LOAD)


def choose_prefill(
    snapshot: Snapshot, facts: RequestFacts, decode: WorkerKey, kv_format: KvFormat, wishes: Wishes = ANY
) -> WorkerKey:
    """The least loaded prefill worker for a decode worker that has granted pages. Raises as `choose` does."""
    anyone = _taken(Role.PREFILL, snapshot.prefill, wishes)
    if snapshot.prefill.first(wishes.exclude, kv_format) is None:
        raise _incompatible(anyone, decode, kv_format)
    if facts.prefix and wishes.prefill is None:
        able = with_holders(
            snapshot.prefill, facts, wishes, best_prefills(snapshot, wishes, kv_format, FEW), [kv_format]
        )
        whole = [prefill for prefill in able if not is_way_broken(snapshot, prefill.key, decode)] or able
        return min(
            whole, key=lambda p: prefill_cost(snapshot, facts, p) + exposed_tokens(snapshot, facts, p, decode)
        ).key
    if not snapshot.links:
        return best_prefills(snapshot, wishes, kv_format, 1)[0].key
    even = even_load(snapshot, [kv_format])
    for num in (FEW, len(snapshot.prefill)):
        few = best_prefills(snapshot, wishes, kv_format, num)
        best = min(few, key=lambda prefill: prefill_rank(snapshot, facts, wishes, prefill, decode, even))
        if not is_way_broken(snapshot, best.key, decode):
            break
    return best.key


def check_ready(snapshot: Snapshot, *, pools: bool = False) -> None:
    """Raises as `choose` does unless a request could be placed: both pools have a ready worker, and two pair. One that
    `pools` needs a prefill worker alone, and in a colocated cluster any other needs a decode worker alone."""
    if pools:
        _taken_for_pooling(snapshot, ANY)
    elif snapshot.is_colocated:
        _taken(Role.DECODE, snapshot.decode, ANY)
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


def _taken_for_pooling(snapshot: Snapshot, wishes: Wishes) -> None:
    if snapshot.is_colocated and not snapshot.is_prefill_coming:
        raise NoWorkerError(
            "this cluster has no prefill workers, which alone make vectors of prompts; `tandem scale --prefill 1` adds "
            "one",
            retryable=False,
        )
    _taken(Role.PREFILL, snapshot.prefill, wishes)


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
    _taken_for_pooling(snapshot, wishes)
    formats = [f for f in snapshot.prefill.formats if snapshot.prefill.first(wishes.exclude, f)]
    best = [best_prefills(snapshot, wishes, kv_format, 1)[0] for kv_format in formats]
    return min(best, key=lambda worker: (worker.key in wishes.avoid, prefill_load(worker)))


# --- decode alone -------------------------------------------------------------------------------------------------


def _computes_alone(snapshot: Snapshot, facts: RequestFacts) -> WorkerKey | None:
    """The decode worker that would have a new prompt computed before any prefill worker, or as soon while nobody is at
    it; `None`: hand it off.

    Only workers with a KV format that both pools have count, because only they could take part in a handoff.
    """
    if not may_be_slow(facts) or not 0 < facts.num_prompt_tokens <= facts.mixed_pool_tokens:
        return None
    with_prefill = snapshot.prefill.formats
    formats = [kv_format for kv_format in snapshot.decode.formats if kv_format in with_prefill]
    if not formats:
        return None
    shortest = next(snapshot.prefill.walk(Order.LOAD, formats))
    # What decode computes, those that wait here have less in front of them.
    held = facts.num_held_tokens * snapshot.share.of / len(snapshot.prefill)
    num_tokens = facts.num_prompt_tokens
    wait = shortest.num_queued_tokens + held + num_tokens
    at_prefill = is_late(snapshot, facts, wait), wait + delay_behind(shortest)
    few = list(islice(snapshot.decode.walk(Order.MIXED, formats, snapshot.share), FEW))
    costs = {}
    for worker in few:
        if has_room(worker, facts):
            wait = steps_cost(snapshot, worker, worker.num_queued_tokens + num_tokens)
            counted = beside_pairs(snapshot, worker, num_tokens, wait) + delay_beside(snapshot, worker, num_tokens)
            costs[worker.key] = is_late(snapshot, facts, wait), counted
    best = min(costs, key=lambda key: costs[key], default=None)
    return best if best is not None and costs[best] < at_prefill else None


# --- decode alone, as there are no prefill workers -----------------------------------------------------------------


def _colocated(snapshot: Snapshot, facts: RequestFacts, wishes: Wishes) -> Route:
    """To the decode worker that recovery wishes, or that has the prompt computed soonest. It computes all of it."""
    _taken(Role.DECODE, snapshot.decode, wishes)
    num_tokens, kept = facts.num_prompt_tokens, snapshot.decode.find(wishes.decode)
    if kept is not None and kept.key not in wishes.exclude | wishes.avoid:
        return Route(None, kept.key, num_tokens, Why.KEPT, unpaced=True)
    able = best_alone(snapshot, facts, wishes, FEW)
    smallest = min(worker.num_active for worker in able)
    costs = {w.key: prefill_cost(snapshot, facts, w) + batch_cost(facts, w, smallest) for w in able}
    best = min(able, key=lambda worker: costs[worker.key]).key
    why = Why.PREFIX if facts.prefix.is_at(best) else Why.COLOCATED
    weighed = tuple(prompt_candidate(facts, worker, costs[worker.key]) for worker in able)
    return Route(None, best, num_tokens, why, weighed, unpaced=True)


# --- where the prompt begins with pages that are held -------------------------------------------------------------


def _cheapest(
    snapshot: Snapshot, facts: RequestFacts, wishes: Wishes, formats: Sequence[KvFormat], alone: WorkerKey | None
) -> Route | None:
    """The way of the least cost among the least loaded workers and those that hold most of the prompt; `None`: no way
    between these works."""
    decodes = best_decodes(snapshot, facts, wishes, formats, FEW)
    if (quickest := snapshot.decode.find(alone)) is not None and quickest not in decodes:
        decodes.append(quickest)
    decodes = with_holders(snapshot.decode, facts, wishes, decodes, formats)
    prefills = [
        prefill
        for kv_format in formats
        for prefill in with_holders(
            snapshot.prefill, facts, wishes, best_prefills(snapshot, wishes, kv_format, FEW), [kv_format]
        )
    ]
    smallest = min(decode.num_active for decode in decodes)
    prefill_costs = {p.key: prefill_cost(snapshot, facts, p) for p in prefills}
    batch_costs = {d.key: batch_cost(facts, d, smallest) for d in decodes}
    decode_costs = {d.key: batch_costs[d.key] + send_cost(facts, d) for d in decodes}
    alone_costs = {d.key: cost_alone(snapshot, facts, d) for d in decodes}

    def cost(prefill: WorkerLoad, decode: WorkerLoad) -> tuple[float, ...]:
        exposed = exposed_tokens(snapshot, facts, prefill, decode.key)
        total = prefill_costs[prefill.key] + decode_costs[decode.key] + exposed
        avoided = (prefill.key in wishes.avoid) + (decode.key in wishes.avoid)
        return is_way_broken(snapshot, prefill.key, decode.key), avoided, total

    # Without what is known of ways a pair costs the sum of its two; so the best few of each role suffice.
    prefills.sort(key=lambda p: (p.key in wishes.avoid, prefill_costs[p.key]))
    by_cost = sorted(decodes, key=lambda d: (d.key in wishes.avoid, decode_costs[d.key]))
    pairs = [(p, d) for d in by_cost for p in prefills if p.kv_format == d.kv_format]
    best = min(pairs if snapshot.links else pairs[:1], key=lambda pair: cost(*pair))
    of_prefill = [prompt_candidate(facts, p, prefill_costs[p.key]) for p in prefills]
    of_decode = [decode_candidate(facts, d, batch_costs[d.key], alone_costs[d.key]) for d in by_cost]
    weighed = (*of_prefill, *of_decode)
    lone = min(decodes, key=lambda d: (d.key in wishes.avoid, alone_costs[d.key] + batch_costs[d.key]))
    lone_cost = alone_costs[lone.key] + batch_costs[lone.key]
    if lone_cost < math.inf:
        is_broken, num_avoided, pair_cost = cost(*best)
        own = own_cost(snapshot, facts, lone.key)
        beside = delay_beside(snapshot, lone, own)
        of_pair = is_broken, num_avoided, is_late(snapshot, facts, pair_cost), pair_cost + delay_behind(best[0])
        of_lone = False, lone.key in wishes.avoid, is_late(snapshot, facts, lone_cost), (
            beside_pairs(snapshot, lone, own, lone_cost) + beside
        )
    if lone_cost < math.inf and of_lone < of_pair:
        is_held = facts.prefix.is_at(lone.key)
        num_left = facts.num_prompt_tokens - facts.prefix.num_ready(lone.key)
        most = int(min(facts.mixed_pool_tokens, facts.num_prompt_tokens, _MOST_GONE * num_left))
        return Route(None, lone.key, most, Why.PREFIX if is_held else Why.MIXED_POOL, weighed)
    prefill, decode = best[0].key, best[1].key
    is_held = facts.prefix.is_at(prefill) or facts.prefix.num_ready(decode) > 0
    if is_way_broken(snapshot, prefill, decode):
        return None
    return Route(prefill, decode, 0, Why.PREFIX if is_held else Why.LOAD, weighed)


# --- two that go well together ------------------------------------------------------------------------------------


def _best_pair(
    snapshot: Snapshot, facts: RequestFacts, wishes: Wishes, formats: Sequence[KvFormat]
) -> tuple[WorkerLoad, WorkerLoad]:
    """The prefill and the decode worker, where something is known of the ways between some."""
    wished_format, even = format_to_pair(snapshot, wishes), even_load(snapshot, formats)

    def rank(pair: tuple[WorkerLoad, WorkerLoad]) -> tuple[float, ...]:
        prefill, decode = pair
        of_prefill = prefill_rank(snapshot, facts, wishes, prefill, decode.key, even)
        is_broken, *others = of_prefill
        return (is_broken, *decode_class(decode, facts, wishes, wished_format), *others)

    best = min(best_pairs(snapshot, facts, wishes, formats, FEW), key=rank)
    if is_way_broken(snapshot, best[0].key, best[1].key):  # as are all of the few: the best of all that is not
        everyone = best_pairs(snapshot, facts, wishes, formats, len(snapshot.prefill) + len(snapshot.decode))
        return next((pair for pair in everyone if not is_way_broken(snapshot, pair[0].key, pair[1].key)), best)
    return best
