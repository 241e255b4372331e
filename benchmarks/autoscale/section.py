"""Laws that size pools by their load, as a section of `docs/benchmarks.md`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.text import wrapped

FORMAT = "tandem-autoscale/1"


def section(content: dict[str, Any]) -> Iterator[str]:
    """Each law, then pools of fixed size, and what the best of these cost."""
    settings, cases, targets = content["settings"], content["cases"], content["targets"]
    bounds, copies = content["bounds"], settings["copies"]
    yield ""
    yield "## Pools that follow their load"
    yield ""
    yield from wrapped(
        "Simulated by `python -m benchmarks autoscale`, so the figures are of no machine "
        f"(sources {content['code']['digest']}): `scenarios/{settings['scenario']}`, which is "
        f"{settings['limit']:,} requests of Azure's conversation trace and then as many of its code trace, "
        f"each {copies} times, {content['num_requests']:,} in all within {content['hours']:.1f} hours. Pools may "
        f"have {bounds['prefill'][0]} to {bounds['prefill'][1]} prefill and {bounds['decode'][0]} to "
        f"{bounds['decode'][1]} decode workers, and one is ready {settings['start_s']:.0f} s after it was asked for. A "
        f"request is kept that has its first token within {targets['ttft_s']:g} s and each further one within "
        f"{targets['tpot_s'] * 1e3:g} ms on average. *The law* is Tandem's, with its defaults; with *flexible* "
        "workers one that is to spare goes to the other pool, by `pools.flexible`. *Proportional* is "
        "what Kubernetes does: workers × measured P90 ÷ target. *One at a time* adds a worker a minute above 80 %, "
        "and takes one away below 50 %."
    )
    yield ""
    titles = "requests kept", "TTFT kept", "worker-hours: prefill", "decode", "in all", "changes", "of roles"
    yield f"| | {' | '.join(titles)} | TTFT p90 | p99 | TPOT p90 |"
    yield f"|---{'|---' * (len(titles) + 3)}|"
    for case in cases:
        hours, changes = case["worker_hours"], case["num_changes"]
        figures = [
            f"{case['kept_share']:.1%}",
            f"{case['ttft_kept_share']:.1%}",
            *(f"{value:.1f}" for value in (hours["prefill"], hours["decode"], _hours(case))),
            str(changes["prefill"] + changes["decode"]),
            str(case["num_role_changes"]),
            f"{case['ttft_p90_s']:.1f} s",
            f"{case['ttft_p99_s']:.1f} s",
            f"{case['tpot_p90_s'] * 1e3:.0f} ms",
        ]
        yield f"| {case['name']} | {' | '.join(figures)} |"
    yield ""
    told = " ".join(_beside_fixed(case, cases) for case in cases if not case["is_fixed"])
    yield from wrapped(f"{told} Fixed sizes are chosen here with the whole load known.")


def _hours(case: dict[str, Any]) -> float:
    return float(sum(case["worker_hours"].values()))


def _beside_fixed(law: dict[str, Any], cases: list[dict[str, Any]]) -> str:
    """A law beside the cheapest fixed sizes that keep as much, as far as some were tried."""
    as_good = [case for case in cases if case["is_fixed"] and case["kept_share"] >= law["kept_share"]]
    if not as_good:
        return f"No fixed size that was tried keeps as many requests as *{law['name']}*."
    best = min(as_good, key=_hours)
    return (
        f"The cheapest fixed sizes that were tried and keep at least as many requests as *{law['name']}* are "
        f"{best['name'].removeprefix('fixed: ')}; it takes {_hours(law) / _hours(best):.2f} times their worker-hours."
    )
