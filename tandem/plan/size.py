"""`tandem plan size`: the search, in several processes, and what it found."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from multiprocessing import get_context
from threading import Lock
from typing import Any, TypeVar

from tandem.core.errors import ConfigError
from tandem.core.worker_types import TypeSpec
from tandem.plan.plan_file import MOST_GOODPUT, Plan
from tandem.plan.search import Pair, cheapest, most_speed, pairs, price, within
from tandem.plan.simulate import Kept, Pools, follow, mean_lengths, simulate
from tandem.sim.scenario import LoadSpec

FORMAT = "tandem-plan-1"
_CHANGE = 0.25
# Of the pools that a budget has, so many are simulated: those of which arithmetic expects most.
_MOST_CANDIDATES = 8

_Asked = TypeVar("_Asked")
_Given = TypeVar("_Given")


@dataclass
class Found:
    """What `size` found.

    Attributes:
        speed: times as fast as the load was given, the targets are kept; 1 unless the goal is the most goodput.
        tries: all that was simulated at the given load, in the order in which it was.
        by_pair: the best of each pair of types, and its price.
        fewer: what the best would keep with one worker less of a role, by that role.
        changed: what the best keeps of a load that is a quarter more or less in one way, by what it is.
    """

    best: Pools
    kept: Kept
    pair: Pair
    speed: float
    tries: list[tuple[Pools, Kept]]
    by_pair: list[tuple[Pools, float]]
    fewer: dict[str, Kept] = field(default_factory=dict)
    changed: dict[str, Kept] = field(default_factory=dict)


class _Simulations:
    """Simulations in other processes, each once. From any thread."""

    def __init__(self, types: dict[str, TypeSpec], processes: int, told: Callable[[int], object]) -> None:
        self._types, self._told = types, told
        # Fresh interpreters: this process has threads, and a fork would take over whatever locks they hold.
        context = get_context("spawn")
        self._stop = context.Event()
        self._pool = ProcessPoolExecutor(processes, mp_context=context, initializer=follow, initargs=(self._stop,))
        self._lock = Lock()
        self._found: dict[tuple[Plan, Pools, bool], Kept] = {}
        self._num = 0

    def close(self) -> None:
        """End those under way too, and begin none any more."""
        self._stop.set()
        self._pool.shutdown(cancel_futures=True)

    def together(self, call: Callable[[_Asked], _Given], asked: Sequence[_Asked]) -> list[_Given]:
        """What `call`, which simulates, gives of each, on threads of their own. Where one fails, or Ctrl-C comes, the
        others do not go on to their ends."""
        with ThreadPoolExecutor(len(asked)) as threads:
            try:
                return list(threads.map(call, asked))
            except BaseException:
                self.close()
                raise

    def __call__(self, plan: Plan, pools: Pools, *, whole: bool = False) -> Kept:
        asked = plan, pools, whole
        with self._lock:
            known = self._found.get(asked)
        if known is not None:
            return known
        kept = self._pool.submit(simulate, plan, self._types, pools, whole=whole).result()
        with self._lock:
            self._found[asked] = kept
            self._num += 1
            self._told(self._num)
        return kept

    def tries(self, plan: Plan) -> list[tuple[Pools, Kept]]:
        with self._lock:
            return [(pools, kept) for (of, pools, _), kept in self._found.items() if of == plan]


def size(
    plan: Plan, types: dict[str, TypeSpec], processes: int | None = None, told: Callable[[int], object] = lambda _: None
) -> Found:
    """`told` hears how many simulations there were.

    Raises:
        ConfigError: a request fits into no type, no pools of `plan.most` workers keep the targets, or none are within
            the budget.
    """
    candidates = list(pairs(plan, types, mean_lengths(plan)))
    if not candidates:
        raise ConfigError(
            f"no type for decode can generate a token in slo.tpot_ms ({plan.slo.tpot_ms:g} ms), even for one request "
            "alone; raise it, or take types with more bytes a second",
            key="slo.tpot_ms",
        )
    simulations = _Simulations(types, processes or len(os.sched_getaffinity(0)), told)
    try:
        search = _most_goodput if plan.goal == MOST_GOODPUT else _cheapest
        found = search(plan, types, candidates, simulations)
        _look_around(plan, found, simulations)
        return found
    finally:
        simulations.close()


def _cheapest(plan: Plan, types: dict[str, TypeSpec], candidates: Sequence[Pair], simulations: _Simulations) -> Found:
    tried = simulations.together(
        lambda pair: cheapest(plan, types, pair, lambda pools: simulations(plan, pools)), candidates
    )
    best = [(pair, pools) for pair, pools in zip(candidates, tried, strict=True) if pools is not None]
    if not best:
        pools, kept = max(simulations.tries(plan), key=lambda one: (one[0].num_prefill, one[0].num_decode, one[1].both))
        raise ConfigError(
            f"no pools of up to {plan.most} workers each keep the targets for {plan.slo.share:.0%} of the requests: "
            f"with {pools}, until too many had missed, {kept.ttft:.0%} kept slo.ttft_ms, {kept.tpot:.0%} slo.tpot_ms; "
            "raise most, or ask for less in slo",
            key="most",
        )
    best.sort(key=lambda one: price(plan, types, one[1]))
    pair, pools = best[0]
    by_pair = [(one, price(plan, types, one)) for _, one in best]
    return Found(pools, simulations(plan, pools, whole=True), pair, 1.0, simulations.tries(plan), by_pair)


def _most_goodput(
    plan: Plan, types: dict[str, TypeSpec], candidates: Sequence[Pair], simulations: _Simulations
) -> Found:
    choices = [(pair, pools) for pair in candidates for pools in within(plan, types, pair)]
    if not choices:
        least = min(price(plan, types, pair.pools(1, 1)) for pair in candidates)
        raise ConfigError(
            f"the budget of {plan.budget:g} is less than a worker of each role costs: {least:g}; raise it", key="budget"
        )

    def expected(choice: tuple[Pair, Pools]) -> float:
        pair, pools = choice
        return min(pools.num_prefill / pair.fewest_prefill, pools.num_decode / pair.fewest_decode)

    choices.sort(key=expected, reverse=True)
    choices = choices[:_MOST_CANDIDATES]

    def speed_of(choice: tuple[Pair, Pools]) -> float:
        def holds(speed: float) -> bool:
            kept = simulations(replace(plan, load=faster(plan.load, speed)), choice[1])
            return kept.is_whole and kept.both >= plan.slo.share

        return most_speed(holds)

    speeds = simulations.together(speed_of, choices)
    order = sorted(range(len(choices)), key=lambda index: -speeds[index])
    speed, (pair, pools) = speeds[order[0]], choices[order[0]]
    if speed == 0.0:
        raise ConfigError(
            f"nothing within the budget of {plan.budget:g} keeps the targets, not even for a 64th of the load; "
            "raise it, or ask for less in slo",
            key="budget",
        )
    reached = replace(plan, load=faster(plan.load, speed))
    by_pair = [(choices[index][1], speeds[index]) for index in order]
    return Found(pools, simulations(reached, pools, whole=True), pair, speed, simulations.tries(reached), by_pair)


def _look_around(plan: Plan, found: Found, simulations: _Simulations) -> None:
    """What one worker less does, and a quarter more or less of the load."""
    plan = replace(plan, load=faster(plan.load, found.speed))
    best = found.best
    asked: dict[str, tuple[Plan, Pools]] = {}
    if best.num_prefill > 1:
        asked["one prefill worker less"] = plan, replace(best, num_prefill=best.num_prefill - 1)
    if best.num_decode > 1:
        asked["one decode worker less"] = plan, replace(best, num_decode=best.num_decode - 1)
    for sign, factor in (("-", 1 - _CHANGE), ("+", 1 + _CHANGE)):
        asked[f"rate {sign}25 %"] = replace(plan, load=faster(plan.load, factor)), best
        if not plan.load.trace:
            load = plan.load
            prompts = replace(load, input_median=load.input_median * factor)
            outputs = replace(load, output_median=load.output_median * factor)
            asked[f"prompts {sign}25 %"] = replace(plan, load=prompts), best
            asked[f"outputs {sign}25 %"] = replace(plan, load=outputs), best
    kept = simulations.together(lambda one: simulations(*one, whole=True), list(asked.values()))
    for name, one in zip(asked, kept, strict=True):
        (found.fewer if name.endswith("less") else found.changed)[name] = one


def faster(load: LoadSpec, speed: float) -> LoadSpec:
    """The same requests, `speed` times as fast."""
    return replace(load, speed=load.speed * speed) if load.trace else replace(load, rate=load.rate * speed)


def num_nodes(pools: Pools, types: dict[str, TypeSpec], role: str) -> int:
    """That have room for the workers of a role."""
    num: int = getattr(pools, f"num_{role}")
    return math.ceil(num / types[getattr(pools, f"{role}_type")].workers_of_node)


def content(plan: Plan, types: dict[str, TypeSpec], found: Found) -> dict[str, Any]:
    """Plain data."""
    best = asdict(found.best)
    result: dict[str, Any] = {
        "format": FORMAT,
        "goal": plan.goal,
        "best": {**best, "price": price(plan, types, found.best)},
        "kept": asdict(found.kept),
        "speed": found.speed,
        "bound": {"decode": found.pair.bound_decode},
        "by_pair": [{**asdict(pools), "value": value} for pools, value in found.by_pair],
        "fewer": {name: asdict(kept) for name, kept in found.fewer.items()},
        "changed": {name: asdict(kept) for name, kept in found.changed.items()},
        "tries": [{"pools": asdict(pools), "kept": asdict(kept)} for pools, kept in found.tries],
    }
    result["nodes"] = {role: num_nodes(found.best, types, role) for role in ("prefill", "decode")}
    return result
