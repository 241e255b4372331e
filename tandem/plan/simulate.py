"""What one choice of pools does with a load: how many of its requests keep their targets. In virtual time."""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple, Protocol

from tandem.bench.load.block_names import BlockNames
from tandem.core.errors import ConfigError
from tandem.core.identity import Role
from tandem.core.pages import PagePool
from tandem.core.time_model import CardSpec, ModelSpec, PoolSpec
from tandem.core.worker_types import TypeSpec
from tandem.plan.calculators import kv_room, roofline
from tandem.plan.plan_file import Plan
from tandem.sim.load import Arrival
from tandem.sim.outcome import Outcome
from tandem.sim.scenario import LoadSpec, Scenario, arrivals
from tandem.sim.shape import WorldShape
from tandem.sim.world import World
from tandem.worker.limits import Site, scheduler_limits
from tandem.worker.scheduler import BatchScheduler


@dataclass(frozen=True, slots=True)
class Pools:
    """Workers of both roles; types by their names."""

    prefill_type: str
    num_prefill: int
    decode_type: str
    num_decode: int

    def __str__(self) -> str:
        return f"{self.num_prefill} prefill ({self.prefill_type}), {self.num_decode} decode ({self.decode_type})"


@dataclass(frozen=True, slots=True)
class Kept:
    """Of a load's requests; shares of all of them.

    Attributes:
        is_whole: the simulation went to its end; else it was ended once too many had missed their targets, and shares
            are of those that ended before.
        busy_prefill: of each worker, of the time up to the last first token.
        decode_batch: sequences that a step of a decode worker generates for, on average.
    """

    both: float
    ttft: float
    tpot: float
    is_whole: bool
    busy_prefill: float
    decode_batch: float
    rate: float  # requests a second that came


class _TooManyMissedError(Exception):
    """No more can be reached."""


class StoppedError(Exception):
    """Nobody wants to know any more."""


class Stop(Protocol):
    """Whether simulations are to end; asked at each request that has ended."""

    def is_set(self) -> bool: ...


_stop: Stop | None = None  # of the process that this one simulates for


def follow(stop: Stop) -> None:
    """In a process that simulates for another one: end where `stop` says so, or with that process, and not by a Ctrl-C
    of the terminal, which reaches both."""
    global _stop
    _stop = stop
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A parent that was killed has told nobody."""
    if (parent := multiprocessing.parent_process()) is not None:
        parent.join()
        os._exit(128 + signal.SIGTERM)


def simulate(plan: Plan, types: dict[str, TypeSpec], pools: Pools, *, whole: bool = False) -> Kept:
    """`whole`: also where the targets cannot be kept any more.

    Raises:
        ConfigError: the trace cannot be read, or a request fits into no worker.
        StoppedError: the process that asked for it has stopped.
    """
    load = _load(plan.load, plan.directory, plan.seed)
    targets = plan.slo
    most_missed = len(load) - math.ceil(targets.share * len(load) - 1e-9)  # a share of floats may lie just above
    kept_ttft = kept_tpot = kept_both = num = 0
    last_first_token_s = 0.0

    def ended(outcome: Outcome) -> None:
        nonlocal kept_ttft, kept_tpot, kept_both, num, last_first_token_s
        if _stop is not None and _stop.is_set():
            raise StoppedError
        last_first_token_s = max(last_first_token_s, outcome.first_token_s)
        tpot_s = outcome.tpot_s
        in_time = outcome.ttft_s <= targets.ttft_ms * 1e-3
        steady = tpot_s is None or tpot_s <= targets.tpot_ms * 1e-3
        num += 1
        kept_ttft += in_time
        kept_tpot += steady
        kept_both += in_time and steady
        if not whole and num - kept_both > most_missed:
            raise _TooManyMissedError

    world = World(_shape(plan, types, pools, load), ended)
    is_whole = True
    try:
        world.run(load)
    except _TooManyMissedError:
        is_whole = False
    busy_s = sum(one.work.busy_s for one in world.machines.values() if one.role is Role.PREFILL)
    decode = [one.work for one in world.machines.values() if one.role is Role.DECODE]
    return Kept(
        both=kept_both / num, ttft=kept_ttft / num, tpot=kept_tpot / num, is_whole=is_whole,
        busy_prefill=busy_s / last_first_token_s / pools.num_prefill,
        decode_batch=sum(work.num_rows for work in decode) / max(1, sum(work.num_steps for work in decode)),
        rate=_rate(load),
    )  # fmt: skip


def _rate(load: Sequence[Arrival]) -> float:
    span_s = load[-1].arrived_s - load[0].arrived_s
    return (len(load) - 1) / span_s if span_s > 0 else float(len(load))


class Means(NamedTuple):
    """Of a load's requests: tokens of a prompt, those of it that an endless prefix cache would not have, and tokens of
    an output, on average; requests a second; and the tokens of the longest one."""

    num_input: float
    num_computed: float
    num_output: float
    rate: float
    longest: int


def mean_lengths(plan: Plan) -> Means:
    load, names = _load(plan.load, plan.directory, plan.seed), BlockNames()
    num, num_computed = len(load), 0
    for one in load:
        _, num_seen = names.keys(one.block_ids if plan.tandem.cache.prefix_cache else ())
        num_computed += max(1, one.num_input - num_seen * one.block_size)
    num_input, num_output = sum(one.num_input for one in load), sum(one.num_output for one in load)
    longest = max(one.num_input + one.num_output for one in load)
    return Means(num_input / num, num_computed / num, num_output / num, _rate(load), longest)


def has_room(plan: Plan, spec: TypeSpec, role: Role, num_tokens: int) -> bool:
    """Whether a worker of this type may serve a request of so many tokens: the pages that its scheduler would want."""
    on_cpu = spec.machine.card.is_cpu
    kept = plan.served.kept(on_cpu=on_cpu)
    num_pages, groups = kept.num_pages(max(0, kv_room(plan.served, spec.machine))), kept.groups
    site = Site(role, on_cpu=on_cpu)
    limits = scheduler_limits(plan.tandem, site, kept.num_slots(num_pages), groups.window, groups.num_windowed)
    return BatchScheduler(PagePool(1, groups.page_size), limits, salt=b"").most_pages(num_tokens) <= num_pages


@lru_cache(maxsize=16)
def _load(spec: LoadSpec, directory: str, seed: int) -> tuple[Arrival, ...]:
    found = tuple(arrivals(Scenario(load=spec, seed=seed), Path(directory)))
    if not found:
        raise ConfigError("the load has no request", key="load")
    if any(one.then is not None for one in found):
        raise ConfigError(
            "a plan takes requests that come by themselves, at a rate that can be raised; here turns wait for answers: "
            "leave conversations and closed out, or simulate it with `tandem sim run`",
            key="load",
        )
    return found


def _shape(plan: Plan, types: dict[str, TypeSpec], pools: Pools, load: Sequence[Arrival]) -> WorldShape:
    served, model = plan.served, plan.served.shape
    spec = ModelSpec(
        parameters=float(model.num_active), layers=model.layers, hidden_size=model.hidden, kv_heads=model.kv_heads,
        head_dim=model.head_dim, kv_dtype=plan.model.kv_dtype, window=model.window, full_layers=model.full_layers,
    )  # fmt: skip
    prefill, decode = types[pools.prefill_type].machine, types[pools.decode_type].machine
    scenario = Scenario(
        prefill=PoolSpec(pools.num_prefill, kv_room(served, prefill)),
        decode=PoolSpec(pools.num_decode, kv_room(served, decode)),
        model=spec, network=plan.network, load=plan.load, tandem=plan.tandem, seed=plan.seed,
    )  # fmt: skip
    # Nearly always both are of one kind; the load, which may be long, is looked through once then.
    kinds = {machine.card.is_cpu for machine in (prefill, decode)}
    shapes = {is_cpu: replace(scenario, card=CardSpec(is_cpu=is_cpu)).shape(load) for is_cpu in kinds}
    of_prefill, of_decode = shapes[prefill.card.is_cpu], shapes[decode.card.is_cpu]
    return replace(
        of_decode,
        prefill=replace(of_prefill.prefill, times=roofline(served, prefill)),
        decode=replace(of_decode.decode, times=roofline(served, decode)),
    )
