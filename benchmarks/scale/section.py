"""How large a cluster the simulator holds, as a section of `docs/benchmarks.md`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.text import wrapped

FORMAT = "tandem-scale/1"
COMMAND = "`python -m benchmarks scale`"


def section(content: dict[str, Any]) -> Iterator[str]:
    """Of the parts that were measured."""
    yield ""
    yield "## Large clusters in the simulator"
    yield ""
    yield from wrapped(
        f"Measured by {COMMAND}: clusters of an 8 B model on H100s, simulated by one thread with the policies that "
        "ship. An event is one call of the simulation's kernel: one for a run of steps in which nothing is decided."
    )
    if "thousand" in content or "azure" in content:
        yield from _runs(content)
    if "growth" in content:
        yield from _growth(content["growth"])


def _runs(content: dict[str, Any]) -> Iterator[str]:
    of_azure = content.get("azure", {}).get("cases", [])
    rows = [("drawn", content["thousand"])] if "thousand" in content else []
    rows += [(f"Azure's conversations{_copies(case)}", case) for case in of_azure]
    titles = "workers", "requests/s", "simulated", "requests", "steps", "CPU time", "events/s", "memory"
    yield ""
    yield f"| load | {' | '.join(titles)} | TTFT p50 | p99 | TPOT p50 | p99 |"
    yield f"|---{'|---:' * (len(titles) + 4)}|"
    for name, case in rows:
        figures = [
            f"{case['workers']['prefill']} + {case['workers']['decode']}",
            f"{case['rate']:,.1f}",
            f"{case['load_s']:,.0f} s",
            f"{case['num_requests']:,}",
            f"{case['num_steps'] / 1e6:.1f} M",
            f"{case['cpu_s']:,.0f} s",
            f"{case['num_events'] / case['cpu_s']:,.0f}",
            f"{case['memory_bytes'] / 2**30:.1f} GiB",
            *(f"{value * 1e3:,.0f} ms" for value in (case["ttft_s"]["p50"], case["ttft_s"]["p99"])),
            *(f"{value * 1e3:.1f} ms" for value in (case["tpot_s"]["p50"], case["tpot_s"]["p99"])),
        ]
        yield f"| {name} | {' | '.join(figures)} |"


def _copies(case: dict[str, Any]) -> str:
    return f", each {case['copies']} times" if case.get("copies", 1) > 1 else ""


def _growth(growth: dict[str, Any]) -> Iterator[str]:
    cases = growth["cases"]
    yield ""
    yield from wrapped(
        f"What grows with the number of workers: {growth['seconds']:g} s of a load that gives each worker as much to "
        "do. Calls are those of functions, Python's own among them, which no other load on the machine changes. To "
        "choose the workers of a request, and to learn a worker's new load, were measured apart, among workers that "
        "differ."
    )
    yield ""
    yield "| workers | requests | calls a request | events a request | to choose | to learn a load |"
    yield "|---:|---:|---:|---:|---:|---:|"
    for case in cases:
        figures = [
            f"{sum(case['workers'].values()):,}",
            f"{case['num_requests']:,}",
            f"{case['calls_a_request']:,.0f}",
            f"{case['events_a_request']:.1f}",
            *(f"{case[name]['calls']:.0f}, {case[name]['us']:.1f} µs" for name in ("choose", "put")),
        ]
        yield f"| {' | '.join(figures)} |"
