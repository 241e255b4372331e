"""Which pools keep a load's targets at the least price: bounds by arithmetic, then simulation. Pure.

More workers of either role keep no fewer targets: so, for a pair of types, each number of prefill workers has a fewest
number of decode workers, which falls as the first rises. The search finds a point of that edge, walks along it both
ways, and stops where no further step can be cheaper than what was found.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from tandem.core.errors import ConfigError
from tandem.core.identity import WORKER_ROLES, Role
from tandem.core.worker_types import TypeSpec
from tandem.plan.calculators import Served, rates
from tandem.plan.plan_file import LEAST_POWER, Plan
from tandem.plan.simulate import Kept, Means, Pools, has_room

Evaluate = Callable[[Pools], Kept]
"""What the pools keep; asked more than once for the same ones, it answers at once."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Types of both roles, and what arithmetic says of them.

    Attributes:
        fewest_prefill, fewest_decode: below these a pool cannot keep up with the load, whatever waits.
        bound_decode: what bounds a decode worker's batch.
    """

    prefill_type: str
    decode_type: str
    fewest_prefill: int
    fewest_decode: int
    bound_decode: str

    def pools(self, num_prefill: int, num_decode: int) -> Pools:
        return Pools(self.prefill_type, num_prefill, self.decode_type, num_decode)


def pairs(plan: Plan, types: dict[str, TypeSpec], means: Means) -> Iterator[Pair]:
    """All that may serve a load of such requests.

    Raises:
        ConfigError: none has room for the longest of them, or none keep the same pages, so that they can hand them off.
    """
    served = plan.served
    roomy = {
        role: [name for name, spec in types.items() if has_room(plan, spec, role, means.longest)]
        for role in WORKER_ROLES
    }
    for role, names in roomy.items():
        if not any(types[name].roles in ("both", role.value) for name in names):
            raise ConfigError(
                f"no type for {role.value} has room for the K and V of the longest request, of {means.longest:,} "
                "tokens; give one more cards, or take a load of shorter ones",
                key="types",
            )
    can_pair = False
    for prefill_name, prefill in types.items():
        for decode_name, decode in types.items():
            if prefill.roles == "decode" or decode.roles == "prefill":
                continue
            if prefill_name not in roomy[Role.PREFILL] or decode_name not in roomy[Role.DECODE]:
                continue
            if not _can_pair(served, prefill, decode):
                continue
            can_pair = True
            lengths = math.ceil(means.num_input), math.ceil(means.num_output), plan.slo.tpot_ms * 1e-3
            of_prefill, of_decode = rates(served, prefill.machine, *lengths), rates(served, decode.machine, *lengths)
            if not of_decode.decode:
                continue  # one sequence alone takes longer than its target
            yield Pair(
                prefill_name,
                decode_name,
                max(1, math.ceil(means.rate * means.num_computed / of_prefill.prefill)),
                max(1, math.ceil(means.rate * means.num_output / of_decode.decode)),
                of_decode.batch.bound,
            )
    if not can_pair:
        raise ConfigError(
            f"behind the window of {plan.model.name} workers on CPUs keep other pages than those on GPUs, so they "
            "cannot exchange them, and no type for prefill has one for decode; let one type serve as both, or set "
            "tandem.cache.mixed_windows to false where some layers see all",
            key="types",
        )


def _can_pair(served: Served, prefill: TypeSpec, decode: TypeSpec) -> bool:
    """Whether they keep the same pages of a text, and so can hand them off."""
    on_cpu = {spec.machine.card.is_cpu for spec in (prefill, decode)}
    return len({served.kept(on_cpu=one) for one in on_cpu}) == 1


def price(plan: Plan, types: dict[str, TypeSpec], pools: Pools) -> float:
    """Of an hour of all workers; where power is what counts, in watts."""
    prefill, decode = types[pools.prefill_type], types[pools.decode_type]
    if plan.goal == LEAST_POWER:
        return pools.num_prefill * prefill.power.busy + pools.num_decode * decode.power.busy
    return pools.num_prefill * prefill.price + pools.num_decode * decode.price


def cheapest(plan: Plan, types: dict[str, TypeSpec], pair: Pair, evaluate: Evaluate) -> Pools | None:
    """The cheapest pools of this pair that keep the targets; `None`: not even `plan.most` workers of each role do."""

    def holds(num_prefill: int, num_decode: int) -> bool:
        kept = evaluate(pair.pools(num_prefill, num_decode))
        return kept.is_whole and kept.both >= plan.slo.share

    most = plan.most
    num_decode = _grown(pair.fewest_decode, most)
    num_prefill = _grown(pair.fewest_prefill, most)
    while not holds(num_prefill, num_decode):
        if num_prefill >= most and num_decode >= most:
            return None
        num_prefill, num_decode = _grown(num_prefill, most), _grown(num_decode, most)
    # From a point on the edge along it, first to more prefill workers, which may do with fewer decode workers.
    first = _fewest(pair.fewest_prefill, num_prefill, lambda num: holds(num, num_decode))
    best = pair.pools(first, _fewest(pair.fewest_decode, num_decode, partial(holds, first)))
    cost = partial(price, plan, types)
    fewest = best.num_decode
    for num in range(first + 1, most + 1):
        if cost(pair.pools(num, pair.fewest_decode)) >= cost(best):
            break
        if holds(num, fewest):  # by chance it may not, where one prefill worker less did
            fewest = _fewest(pair.fewest_decode, fewest, partial(holds, num))
            best = min(best, pair.pools(num, fewest), key=cost)
    # Then to fewer, which may do with more decode workers than these, as long as they are not too dear.
    for num in range(first - 1, pair.fewest_prefill - 1, -1):
        dearest = next((d for d in range(most, 0, -1) if cost(pair.pools(num, d)) < cost(best)), 0)
        if dearest > num_decode and holds(num, dearest):
            best = pair.pools(num, _fewest(num_decode + 1, dearest, partial(holds, num)))
    return best


def _grown(num: int, most: int) -> int:
    return min(most, max(num + 1, math.ceil(1.5 * num)))


def _fewest(low: int, high: int, holds: Callable[[int], bool]) -> int:
    """The least number from `low` to `high` that holds; `high` does."""
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle + 1, high)
    return high


def within(plan: Plan, types: dict[str, TypeSpec], pair: Pair) -> Iterator[Pools]:
    """For each number of prefill workers the most decode workers that the budget has, of this pair."""
    prefill, decode = types[pair.prefill_type], types[pair.decode_type]
    for num in range(1, plan.most + 1):
        left = plan.budget - num * prefill.price
        num_decode = plan.most if decode.price == 0 else min(plan.most, math.floor(left / decode.price + 1e-9))
        if left < 0 or num_decode < 1:
            return
        yield pair.pools(num, num_decode)


def most_speed(evaluate: Callable[[float], bool], *, steps: int = 6) -> float:
    """How many times as fast the load may come: to within 1/2^`steps` of where it fails; 0: not at a 64th of it."""
    low, high = 0.0, 1.0
    if evaluate(1.0):
        low, high = 1.0, 2.0
        while high <= 1024 and evaluate(high):
            low, high = high, 2 * high
    for _ in range(steps):
        middle = (low + high) / 2
        low, high = (middle, high) if evaluate(middle) else (low, middle)
    return low
