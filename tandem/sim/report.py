"""What a simulation found: plain data, and tables of it."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.table import Table

from router.observe.trace import PART_NAMES
from router.request.targets import Targets
from tandem.bench.load.records import RequestRecord, Slo
from tandem.bench.machine import machine, now, versions
from tandem.bench.report.results import FORMAT
from tandem.bench.report.summary import (
    CacheUse,
    Distribution,
    Summary,
    TurnFigures,
    distribution,
    summarise,
    window_s,
)  # fmt: skip
from tandem.bench.report.tables import LATENCIES, turn_table
from tandem.bench.session import Shape
from tandem.core.errors import ConfigError, DeadlineError, OverloadedError, RateLimitError, UnmeetableDeadlineError
from tandem.core.identity import WORKER_ROLES, Role
from tandem.sim.costs import cost_rows, cost_table, costs
from tandem.sim.outcome import Outcome
from tandem.sim.scenario import Scenario
from tandem.sim.world import World

_OF_THEIR_OWN = OverloadedError, RateLimitError, UnmeetableDeadlineError, DeadlineError  # counts
_MOST_TURNS = 12  # that are printed


def _none_left(num_of: Mapping[str, int]) -> ConfigError:
    """That all requests failed, with what most often made them: that is what to change."""
    causes = ", ".join(f"{num} × {code}" for code, num in sorted(num_of.items(), key=lambda kind: -kind[1]))
    most = max(num_of, key=lambda code: num_of[code])
    if most in (DeadlineError.code, UnmeetableDeadlineError.code):
        return ConfigError(f"all requests failed ({causes}); give them more time", key="classes.timeout")
    if most in (OverloadedError.code, RateLimitError.code):
        return ConfigError(f"all requests were refused ({causes}); let fewer come, or allow more", key="load.rate")
    return ConfigError(f"all requests failed ({causes}); let fewer workers die, or later", key="faults")


def content(world: World, scenario: Scenario, name: str, outcomes: Sequence[Outcome], took_s: float) -> dict[str, Any]:
    """All that `tandem bench run` writes of a measurement, and beside it what only a simulation knows.

    `name`: of the scenario; `took_s`: of this machine. Latencies are of requests that have not failed.
    """
    asked, outcomes = outcomes, [outcome for outcome in outcomes if not outcome.error]
    num_of = Counter(one.error for one in asked)
    num_refused, num_unmeetable = num_of[OverloadedError.code], num_of[UnmeetableDeadlineError.code]
    if not outcomes:
        raise _none_left(num_of)
    end_s = max(outcome.last_token_s for outcome in outcomes)
    num_input, num_output = sum(one.arrival.num_input for one in outcomes), sum(one.num_tokens for one in outcomes)
    load = scenario.load
    is_drawn = not load.trace and not load.concurrency
    shape = Shape(load.concurrency or None, load.rate if is_drawn else None)
    type_of = {life.key: life.type for life in world.fleet.lives}
    gaps = distribution([one.longest_gap_s for one in outcomes if one.num_tokens > 1])
    summary = _summary(world, asked, end_s)
    parts = {name: [one.parts[name] for one in outcomes if name in one.parts] for name in PART_NAMES.values()}
    return {
        "format": FORMAT,
        "kind": "run",
        "is_simulated": True,
        "date": now(),
        "was_interrupted": False,
        "server": {"url": "", "model": name, "max_model_len": None, "name": "tandem sim"},
        "options": {"label": name, **dataclasses.asdict(scenario.load), "seed": scenario.seed},
        "cut": None,
        "machine": machine(),
        "versions": versions(),
        "runs": [
            {
                "shape": {"name": shape.name, **dataclasses.asdict(shape)},
                "is_partial": False,
                "num_unsent": world.num_unsent,
                "figures": dataclasses.asdict(summary),
                "generator": None,
                "digests": [],
            }
        ],
        "simulated_s": end_s,
        "took_s": took_s,
        "num_events": world.kernel.num_run,
        "num_requests": len(asked),
        "num_failed": len(asked) - len(outcomes) - sum(num_of[error.code] for error in _OF_THEIR_OWN),
        "num_refused": num_refused,
        "num_over_limits": num_of[RateLimitError.code],
        "num_unmeetable": num_unmeetable,
        "num_timed_out": num_of[DeadlineError.code],
        "num_unsent": world.num_unsent,
        "num_recovered": sum(one.num_recoveries > 0 for one in outcomes),
        "num_recoveries": sum(one.num_recoveries for one in asked),
        "num_input_tokens": num_input,
        "num_cached_tokens": sum(one.num_cached or 0 for one in outcomes) if world.shape.prefix_cache else None,
        "tiers": _tiers(world),
        "num_output_tokens": num_output,
        "output_tokens_per_s": num_output / end_s,
        "slo": {
            "ttft_s": world.shape.ttft_s,
            "tpot_s": world.shape.tpot_s,
            "kept_share": world.figures.num_kept / len(asked),
        },
        "classes": [_class(world, name, asked) for name in world.shape.kinds],
        "tenants": [_tenant(world, name, asked) for name in world.shape.tenants],
        "worker_hours": {role.value: worker_hours(world, role, end_s) for role in WORKER_ROLES},
        "costs": costs(world, end_s, num_input + num_output, num_output),
        "pools": {role.value: _pool(world, role, end_s) for role in WORKER_ROLES},
        "role_changes": [
            {
                "at_s": at_s,
                "giver": change.giver.value,
                "taker": change.taker.value,
                "why": change.why,
                "inputs": dict(change.inputs),
            }
            for at_s, change in world.role_changes
        ],
        "routers": [
            {
                "name": _router_name(router.number),
                "num_requests": router.num_requests,
                "num_placed": router.num_placed,
                "most_waiting": router.most_waiting,
            }
            for router in world.routers
        ],
        "num_by_decode_alone": sum(not one.prefill for one in outcomes),
        "longest_gap_s": dataclasses.asdict(gaps) if gaps else None,
        "parts": {
            name: dataclasses.asdict(found) if (found := distribution(values)) else None
            for name, values in parts.items()
        },
        "workers": [
            {
                "name": machine.key.worker_id,
                "role": machine.role.value,
                "type": type_of[machine.key],
                "busy_share": machine.work.busy_s / end_s,
                **dataclasses.asdict(machine.work),
            }
            for machine in world.machines.values()
        ],
        "requests": [
            {
                "number": one.arrival.number,
                "tenant": one.arrival.tenant,
                "class": one.arrival.kind,
                "conversation": one.arrival.conversation,
                "turn": one.arrival.turn,
                "arrived_s": one.arrival.arrived_s,
                "num_input": one.arrival.num_input,
                "num_output": one.arrival.num_output,
                "router": _router_name(one.router),
                "prefill": one.prefill,
                "decode": one.decode,
                "first_token_s": one.first_token_s,
                "last_token_s": one.last_token_s,
                "longest_gap_s": one.longest_gap_s,
                "num_cached": one.num_cached,
                "num_recoveries": one.num_recoveries,
                "parts": one.parts,
            }
            for one in outcomes
        ],
    }


def _router_name(number: int) -> str:
    """As a cluster calls it."""
    return f"{Role.ROUTER.value}-{number}"


def _tenant(world: World, name: str, asked: Sequence[Outcome]) -> dict[str, Any]:
    """What one tenant got of what it asked for. `num_tokens`: of prompts and outputs."""
    own, who = [one for one in asked if one.arrival.tenant == name], world.shape.tenants[name]
    return {
        "name": name,
        "weight": who.tenant.weight,
        "priority": who.priority,
        **_got(own),
        "num_tokens": sum(one.arrival.num_input + one.num_tokens for one in own if not one.error),
    }


def _class(world: World, name: str, asked: Sequence[Outcome]) -> dict[str, Any]:
    """What became of the requests of one class."""
    own, kind = [one for one in asked if one.arrival.kind == name], world.shape.kinds[name]
    num_of = Counter(one.error for one in own)
    tpot = distribution([one.tpot_s for one in own if not one.error and one.tpot_s is not None])
    cluster = Targets(world.shape.ttft_s, world.shape.tpot_s)
    wanted = cluster.but(kind.ttft_ms, kind.tpot_ms)
    return {
        "name": name,
        "priority": kind.priority,
        "timeout_s": kind.timeout_s,
        "slo": {"ttft_s": wanted.ttft_s, "tpot_s": wanted.tpot_s},
        **_got(own),
        "num_unmeetable": num_of[UnmeetableDeadlineError.code],
        "num_timed_out": num_of[DeadlineError.code],
        "tpot_s": dataclasses.asdict(tpot) if tpot else None,
    }


def _got(own: Sequence[Outcome]) -> dict[str, Any]:
    """`kept_share`: of all of these requests, those that kept both of their targets."""
    served = [one for one in own if not one.error]
    ttft = distribution([one.ttft_s for one in served])
    return {
        "num_requests": len(own),
        "num_refused": sum(one.error == OverloadedError.code for one in own),
        "num_over_limits": sum(one.error == RateLimitError.code for one in own),
        "kept_share": sum(one.kept for one in served) / max(1, len(own)),
        "ttft_s": dataclasses.asdict(ttft) if ttft else None,
    }


def _tiers(world: World) -> dict[str, Any] | None:
    """Pages of prompts that pools lacked, and what was read and written in each tier; of all workers together."""
    found = [machine.tiers for machine in world.machines.values() if machine.tiers is not None]
    if not found:
        return None
    counters, stores = [each.counters for each in found], [store for each in found for store in each.stores]
    return {
        "num_fetched": sum(each.num_fetched for each in counters),
        "num_missed": sum(each.num_missed for each in counters),
        "num_abandoned": sum(each.num_abandoned for each in counters),
        "tiers": {
            name: {
                "num_pages": sum(store.held()[0] for store in stores if store.name == name),
                **{
                    field: sum(getattr(store.counters, field) for store in stores if store.name == name)
                    for field in ("num_read", "num_written", "num_evicted", "read_s", "write_s")
                },
            }
            for name in dict.fromkeys(store.name for store in stores)
        },
    }


def _summary(world: World, asked: Sequence[Outcome], end_s: float) -> Summary:
    """As of a run of `tandem bench`."""
    has_turns = any(one.arrival.turn > 1 for one in asked)
    said = {  # tokens of a conversation, after each turn
        (one.arrival.conversation, one.arrival.turn): one.arrival.num_input + one.arrival.num_output for one in asked
    }
    records = [_record(world, one, said, has_turns=has_turns) for one in asked]
    found = summarise(records, end_s, Slo(world.shape.ttft_s, world.shape.tpot_s))
    if (gaps := world.gaps) is None:
        return dataclasses.replace(found, num_events=found.num_output_tokens, itl_s=None, itl_windows=())
    return dataclasses.replace(
        found, num_events=found.num_output_tokens, itl_s=gaps.distribution(), itl_windows=gaps.windows(window_s(end_s))
    )


def _record(
    world: World, one: Outcome, said: Mapping[tuple[int | None, int], int], *, has_turns: bool
) -> RequestRecord:
    """Of its tokens' times the first, the second and the last: those of all others are not kept."""
    arrival = one.arrival
    times = (one.first_token_s, one.second_token_s, one.last_token_s)[: one.num_tokens]
    is_turn = has_turns and arrival.conversation is not None
    return RequestRecord(
        number=arrival.number,
        num_input_asked=arrival.num_input,
        num_output_asked=arrival.num_output,
        sent_s=arrival.arrived_s,
        ended_s=one.last_token_s,
        failure=one.error or None,
        event_s=times,
        num_input=arrival.num_input,
        num_output=one.num_tokens,
        num_cached=(one.num_cached or 0) if world.shape.prefix_cache else None,
        num_repeated=said.get((arrival.conversation, arrival.turn - 1), 0) if is_turn else None,
        turn=arrival.turn if is_turn else None,
    )


def worker_hours(world: World, role: Role, end_s: float) -> float:
    """Of all workers of a pool, from when each was asked for until it was gone."""
    return sum(life.worked_s(end_s) for life in world.fleet.lives if life.role is role) / 3600


def sizes_over_time(world: World, role: Role) -> list[tuple[float, int, int]]:
    """After each change: seconds, workers that are wanted, and that are ready."""
    lives = [life for life in world.fleet.lives if life.role is role]
    moments = {0.0, *(moment for life in lives for moment in (life.asked_s, life.ready_s, life.left_s) if moment)}
    return [
        (
            time,
            sum(life.asked_s <= time and (life.left_s is None or time < life.left_s) for life in lives),
            sum(life.is_ready(time) for life in lives),
        )
        for time in sorted(moments)
    ]


def _pool(world: World, role: Role, end_s: float) -> dict[str, Any]:
    """Bounds, sizes over time and why they changed."""
    bounds = world.shape.ranges.get(role)
    decisions = [decision for decision in world.decisions if decision.role is role]
    lives = [life for life in world.fleet.lives if life.role is role]
    return {
        "least": bounds.least if bounds else None,
        "most": bounds.most if bounds else None,
        "mean": sum(life.worked_s(end_s) for life in lives) / end_s,
        "sizes": sizes_over_time(world, role),
        "changes": [
            {
                "at_s": each.at_s,
                "before": each.before,
                "wanted": each.wanted,
                "why": each.why,
                "inputs": dict(each.inputs),
            }
            for each in decisions
        ],
    }


def tables(found: dict[str, Any]) -> list[Table]:
    """Latencies and their parts in milliseconds, then counts, then what each pool did."""
    latencies = Table("ms", "mean", "p50", "p90", "p99", "max", box=None)
    figures = found["runs"][0]["figures"]
    rows = [(title, figures[name]) for title, name in LATENCIES]
    for title, values in [*rows, ("longest gap", found["longest_gap_s"]), *found["parts"].items()]:
        one = Distribution(**values) if values else None
        shown = (one.mean, one.p50, one.p90, one.p99, one.max) if one else ()
        latencies.add_row(title, *(f"{value * 1e3:,.1f}" for value in shown))
    counts = Table(show_header=False, box=None)
    counts.add_row("requests", f"{found['num_requests']:,}, {found['num_by_decode_alone']:,} of them by decode alone")
    if found["num_recoveries"] or found["num_failed"]:
        recovered = f"{found['num_recovered']:,} requests whose workers died; {found['num_failed']:,} failed"
        counts.add_row("recovered", recovered)
    if found["num_unsent"]:
        counts.add_row("not sent", f"{found['num_unsent']:,} turns, as one before them failed")
    if found["num_unmeetable"] or found["num_timed_out"]:
        refused, passed = found["num_unmeetable"], found["num_timed_out"]
        counts.add_row("deadlines", f"{refused:,} requests refused as they could not be met; {passed:,} passed")
    if found["num_over_limits"]:
        counts.add_row("over limits", f"{found['num_over_limits']:,} requests, of what their tenants may have a minute")
    if found["num_refused"]:
        counts.add_row("refused", f"{found['num_refused']:,} requests, as in an overload")
    counts.add_row("tokens", f"{found['num_input_tokens']:,} in, {found['num_output_tokens']:,} out")
    if found["num_cached_tokens"] is not None:
        share = found["num_cached_tokens"] / found["num_input_tokens"]
        counts.add_row("prefix caches", f"held {share:.1%} of the tokens of prompts")
    if (tiers := found["tiers"]) is not None:
        read = ", ".join(f"{each['num_read']:,} from {name}" for name, each in tiers["tiers"].items())
        counts.add_row("page tiers", f"gave {tiers['num_fetched']:,} pages ({read}); none had {tiers['num_missed']:,}")
    counts.add_row("output throughput", f"{found['output_tokens_per_s']:,.1f} tokens/s")
    slo = found["slo"]
    targets = f"TTFT {slo['ttft_s']:g} s and TPOT {slo['tpot_s'] * 1e3:g} ms"
    targets = "the targets of their classes" if found["classes"] else targets
    counts.add_row("SLO attainment", f"{slo['kept_share']:.1%} of the requests kept {targets}")
    if found["costs"] is not None:
        for name, said in cost_rows(found["costs"]):
            counts.add_row(name, said)
    if len(found["routers"]) > 1:
        counts.add_row("routers", _routers_said(found["routers"]))
    if found["role_changes"]:
        counts.add_row("role changes", str(len(found["role_changes"])))
    counts.add_row("simulated", f"{found['simulated_s']:,.1f} s in {found['took_s']:,.1f} s")
    pools = Table("pool", "workers", "worker-hours", "busy", "changes", "steps", "preemptions", box=None)
    for role in (Role.PREFILL, Role.DECODE):
        workers = [one for one in found["workers"] if one["role"] == role.value]
        if not workers:  # colocated
            continue
        pool, hours = found["pools"][role.value], found["worker_hours"][role.value]
        busy = sum(one["busy_s"] for one in workers) / (3600 * hours)
        steps, preemptions = (sum(one[name] for one in workers) for name in ("num_steps", "num_preemptions"))
        wanted = [size for _, size, _ in pool["sizes"]]
        sizes = f"{min(wanted)} to {max(wanted)}" if pool["changes"] else str(wanted[0])
        changes = str(len(pool["changes"]))
        pools.add_row(role.value, sizes, f"{hours:,.1f}", f"{busy:.0%}", changes, f"{steps:,}", f"{preemptions:,}")
    tenants = _tenant_table(found["tenants"])
    classes = _class_table(found["classes"])
    for table in (latencies, pools, tenants, classes):
        for column in table.columns[1:]:
            column.justify = "right"
    turns = [turn_table([_turn_from(each) for each in figures["turns"][:_MOST_TURNS]])] if figures["turns"] else []
    of_shares = [table for table in (classes, tenants) if table.rows]
    of_types = [cost_table(found["costs"])] if found["costs"] is not None else []
    return [latencies, counts, pools, *of_types, *turns, *of_shares]


def _routers_said(routers: Sequence[dict[str, Any]]) -> str:
    placed, waiting = ([one[name] for one in routers] for name in ("num_placed", "most_waiting"))
    said = f"{len(routers)}; each placed {min(placed):,} to {max(placed):,} times"
    waited = f"at most {max(waiting):,} requests waited in one at a time" if max(waiting) else "nobody waited in them"
    return f"{said}, and {waited}"


def _tenant_table(tenants: Sequence[dict[str, Any]]) -> Table:
    table = Table("tenant", "weight", "requests", "refused", "tokens", "kept", "TTFT p50, ms", "p99", box=None)
    for each in tenants:
        refused = each["num_refused"] + each["num_over_limits"]
        counted = (f"{number:,}" for number in (each["num_requests"], refused, each["num_tokens"]))
        table.add_row(
            each["name"], f"{each['weight']:g}", *counted, f"{each['kept_share']:.1%}", *_in_ms(each["ttft_s"])
        )
    return table


def _class_table(classes: Sequence[dict[str, Any]]) -> Table:
    """Refused are those of an overload or beyond limits, and those whose deadlines could not be met."""
    table = Table("class", "requests", "refused", "timed out", "kept", "TTFT p50", "p99", "TPOT p50", "p99", box=None)
    for each in classes:
        refused = each["num_refused"] + each["num_over_limits"] + each["num_unmeetable"]
        counted = (f"{number:,}" for number in (each["num_requests"], refused, each["num_timed_out"]))
        latencies = (*_in_ms(each["ttft_s"]), *_in_ms(each["tpot_s"]))
        table.add_row(each["name"], *counted, f"{each['kept_share']:.1%}", *latencies)
    return table


def _in_ms(found: dict[str, float] | None) -> Iterator[str]:
    """Median and 99th percentile."""
    return (f"{found[name] * 1e3:,.1f}" if found else "" for name in ("p50", "p99"))


def _turn_from(found: dict[str, Any]) -> TurnFigures:
    ttft, cache = found["ttft_s"], found["cache"]
    return TurnFigures(
        **found | {"ttft_s": Distribution(**ttft) if ttft else None, "cache": CacheUse(**cache) if cache else None}
    )
