"""What a simulation found: plain data, and tables of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from rich.table import Table

from tandem.bench.report.summary import Distribution, distribution
from tandem.core.identity import Role
from tandem.sim.world import Outcome, World

FORMAT = "tandem-simulation-1"


def content(world: World, outcomes: Sequence[Outcome], took_s: float) -> dict[str, Any]:
    """`took_s`: of this machine."""
    end_s = max(outcome.last_token_s for outcome in outcomes)
    latencies = {
        "ttft_s": [one.ttft_s for one in outcomes],
        "tpot_s": [one.tpot_s for one in outcomes if one.tpot_s is not None],
        "longest_gap_s": [one.longest_gap_s for one in outcomes if one.num_tokens > 1],
        "e2e_s": [one.e2e_s for one in outcomes],
    }
    return {
        "format": FORMAT,
        "simulated_s": end_s,
        "took_s": took_s,
        "num_events": world.kernel.num_run,
        "num_requests": len(outcomes),
        "num_input_tokens": sum(one.arrival.num_input for one in outcomes),
        "num_output_tokens": sum(one.num_tokens for one in outcomes),
        "output_tokens_per_s": sum(one.num_tokens for one in outcomes) / end_s,
        "num_by_decode_alone": sum(not one.prefill for one in outcomes),
        "latencies": {
            name: dataclasses.asdict(found) if (found := distribution(values)) else None
            for name, values in latencies.items()
        },
        "workers": [
            {
                "name": machine.key.worker_id,
                "role": machine.role.value,
                "busy_share": machine.work.busy_s / end_s,
                **dataclasses.asdict(machine.work),
            }
            for machine in world.machines.values()
        ],
        "requests": [
            {
                "number": one.arrival.number,
                "arrived_s": one.arrival.arrived_s,
                "num_input": one.arrival.num_input,
                "num_output": one.arrival.num_output,
                "prefill": one.prefill,
                "decode": one.decode,
                "first_token_s": one.first_token_s,
                "last_token_s": one.last_token_s,
                "longest_gap_s": one.longest_gap_s,
            }
            for one in outcomes
        ],
    }


def tables(found: dict[str, Any]) -> list[Table]:
    """Latencies in milliseconds, then counts, then what each pool did."""
    latencies = Table("ms", "mean", "p50", "p90", "p99", "max", box=None)
    titles = {"ttft_s": "TTFT", "tpot_s": "TPOT", "longest_gap_s": "longest gap", "e2e_s": "E2E"}
    for name, title in titles.items():
        values = found["latencies"][name]
        one = Distribution(**values) if values else None
        shown = (one.mean, one.p50, one.p90, one.p99, one.max) if one else ()
        latencies.add_row(title, *(f"{value * 1e3:,.1f}" for value in shown))
    counts = Table(show_header=False, box=None)
    counts.add_row("requests", f"{found['num_requests']:,}, {found['num_by_decode_alone']:,} of them by decode alone")
    counts.add_row("tokens", f"{found['num_input_tokens']:,} in, {found['num_output_tokens']:,} out")
    counts.add_row("output throughput", f"{found['output_tokens_per_s']:,.1f} tokens/s")
    counts.add_row("simulated", f"{found['simulated_s']:,.1f} s in {found['took_s']:,.1f} s")
    pools = Table("pool", "workers", "busy", "steps", "preemptions", box=None)
    for role in (Role.PREFILL, Role.DECODE):
        workers = [one for one in found["workers"] if one["role"] == role.value]
        busy = sum(one["busy_share"] for one in workers) / len(workers)
        steps, preemptions = (sum(one[name] for one in workers) for name in ("num_steps", "num_preemptions"))
        pools.add_row(role.value, str(len(workers)), f"{busy:.0%}", f"{steps:,}", f"{preemptions:,}")
    for table in (latencies, pools):
        for column in table.columns[1:]:
            column.justify = "right"
    return [latencies, counts, pools]
