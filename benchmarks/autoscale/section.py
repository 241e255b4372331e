"""Laws that size pools by their load, as a section of `docs/benchmarks.md` and its plot."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.autoscale.cases import LAW, ONE_AT_A_TIME, PHASES, PROPORTIONAL
from benchmarks.line_plot import Line, Panel, svg
from benchmarks.text import wrapped

FORMAT = "tandem-autoscale/2"
COMMAND = "`python -m benchmarks autoscale`"
PLOT = Path("docs/figures/autoscale.svg")

BEST = "the best fixed sizes"
#: In the order in which they are drawn; what ships last.
_DRAWN = (BEST, PROPORTIONAL, ONE_AT_A_TIME, LAW)

_Found = dict[str, Any]


def hours_of(found: _Found) -> float:
    """Of the workers of both pools."""
    return float(sum(found["worker_hours"].values()))


def best_fixed(law: _Found, cases: Sequence[_Found]) -> _Found | None:
    """The cheapest of the fixed sizes that were tried which keep as many requests; `None`: none does."""
    as_good = [case for case in cases if case["is_fixed"] and case["kept_share"] >= law["kept_share"]]
    return min(as_good, key=hours_of, default=None)


def _by_size(content: _Found) -> dict[int, list[_Found]]:
    """Of sizes of which all that is drawn is there."""
    found: dict[int, list[_Found]] = {}
    for case in content["cases"].values():
        found.setdefault(case["workers"], []).append(case)
    return {workers: cases for workers, cases in found.items() if {*_DRAWN[1:]} <= {case["name"] for case in cases}}


def _named(cases: Sequence[_Found], name: str) -> _Found:
    return next(case for case in cases if case["name"] == name)


def section(content: _Found) -> Iterator[str]:
    """Of each size its laws, then pools of fixed size, and what the best of these cost."""
    settings, of_sizes = content["settings"], _by_size(content)
    spans = {one["workers"]: one["phase_s"] / 60 for one in settings["sizes"] if one["workers"] in of_sizes}
    yield ""
    yield "## Pools that follow their load"
    yield ""
    yield from wrapped(
        f"Simulated by {COMMAND}, so the figures are of no machine (sources {content['code']['digest']}): Azure's "
        f"{', then its '.join(PHASES)}, on the workers of `scenarios/{settings['scenario']}`. Of its two traces come "
        "as many copies as there are times 32 workers, the first as it was recorded and the others up to half a minute "
        "sooner or later, and on 8 workers a quarter of the requests; so all sizes have as much load for each worker. "
        "Each trace lasts "
        f"{_listed([f'{minutes:g} minutes on {workers} workers' for workers, minutes in spans.items()])}; a simulation "
        "takes as long as there are requests. Pools have three prefill workers for each decode worker at most, begin "
        "with a third of prefill's and three eighths of decode's, rounded, and a worker is ready "
        f"{settings['start_s']:.0f} s after it was asked for. A request is kept that has its first token "
        f"within {settings['ttft_s']:g} s and each further one within "
        f"{settings['tpot_s'] * 1e3:g} ms on average. *The law* is Tandem's, with its defaults; with *flexible* "
        "workers one that is to spare goes to the other pool, by `pools.flexible`. *Proportional* is what Kubernetes "
        "does: workers × measured P90 ÷ target, every 15 s, with its tolerance and its five minutes before it shrinks. "
        "*One at a time* adds a worker a minute above 80 %, and takes one away below 50 %."
    )
    if others := [key for key, case in content["cases"].items() if case.get("code") != content["code"]["digest"]]:
        yield ""
        yield from wrapped(
            f"**Not all is of the same sources**: {_listed(others)} were simulated by others than the rest, so compare "
            "them with care."
        )
    yield ""
    titles = "workers", "", "requests kept", "TTFT kept", "worker-hours: prefill", "decode", "in all", "changes"
    yield f"| {' | '.join(titles)} | TTFT p90 | p99 | TPOT p90 |"
    yield f"|---{'|---' * (len(titles) + 2)}|"
    for workers, cases in of_sizes.items():
        for case in cases:
            yield _row(workers, case)
    yield ""
    for workers, cases in of_sizes.items():
        told = (_beside_fixed(case, cases) for case in cases if not case["is_fixed"])
        requests = f"{cases[0]['num_requests']:,} requests"
        yield from wrapped(f"- **{workers} workers**, {requests}: {'; '.join(told)}.")
    yield ""
    yield from wrapped(
        "Fixed sizes are chosen here with the whole load known; those that are named are the cheapest that were tried "
        "and keep at least as many requests."
    )
    if of_sizes:
        yield ""
        yield f"![Requests kept and worker-hours by size, and sizes over time](figures/{PLOT.name})"


def _row(workers: int, case: _Found) -> str:
    hours, changes = case["worker_hours"], case["num_changes"]
    of_roles = f", {case['num_role_changes']} of roles" if case["num_role_changes"] else ""
    figures = [
        str(workers),
        f"fixed: {case['name']}" if case["is_fixed"] else case["name"],
        f"{case['kept_share']:.1%}",
        f"{case['ttft_kept_share']:.1%}",
        *(f"{value:.1f}" for value in (hours["prefill"], hours["decode"], hours_of(case))),
        f"{changes['prefill'] + changes['decode']}{of_roles}",
        f"{case['ttft_p90_s']:.1f} s",
        f"{case['ttft_p99_s']:.1f} s",
        f"{case['tpot_p90_s'] * 1e3:.0f} ms",
    ]
    return f"| {' | '.join(figures)} |"


def _listed(each: Sequence[str]) -> str:
    return " and ".join((", ".join(each[:-1]), each[-1])) if len(each) > 1 else "".join(each)


def _beside_fixed(law: _Found, cases: Sequence[_Found]) -> str:
    best = best_fixed(law, cases)
    if best is None:
        return f"no fixed sizes that were tried keep as many as *{law['name']}*"
    return f"*{law['name']}* takes {hours_of(law) / hours_of(best):.2f} times the worker-hours of {best['name']}"


def plot(content: _Found) -> str:
    """An SVG: what each law keeps and costs by the cluster's size, and sizes of the largest over time; empty where no
    size is complete."""
    of_sizes = _by_size(content)
    if not of_sizes:  # `section` shows none then
        return svg([], columns=2)
    labels = [str(workers) for workers in of_sizes]
    kept: dict[str, list[tuple[float, float]]] = {name: [] for name in _DRAWN}
    share: dict[str, list[tuple[float, float]]] = {name: [] for name in _DRAWN}
    for number, (workers, cases) in enumerate(of_sizes.items()):
        of_names = {name: _named(cases, name) for name in _DRAWN[1:]}
        if (best := best_fixed(of_names[LAW], cases)) is not None:
            of_names[BEST] = best
        for name, case in of_names.items():
            kept[name].append((number, 100 * case["kept_share"]))
            share[name].append((number, 100 * hours_of(case) / (workers * case["hours"])))
    panels = [
        Panel("requests kept, %", "workers at most", _lines(kept), labels, is_linear=True),
        Panel("worker-hours, % of all workers all the time", "workers at most", _lines(share), labels, is_linear=True),
    ]
    largest, cases = list(of_sizes.items())[-1]
    of_names = {name: _named(cases, name) for name in _DRAWN[1:]}
    if (best := best_fixed(of_names[LAW], cases)) is not None:
        of_names[BEST] = best
    for role in ("prefill", "decode"):
        over_time = {name: _over_time(case, role) for name, case in of_names.items()}
        panels.append(Panel(f"{role} workers, {largest} in all at most", "minutes", _lines(over_time), is_linear=True))
    return svg(panels, columns=2)


def _over_time(case: _Found, role: str) -> list[tuple[float, float]]:
    step = case["step_s"] / 60
    return [((number + 0.5) * step, num) for number, num in enumerate(case["sizes"][role])]


def _lines(each: dict[str, list[tuple[float, float]]]) -> list[Line]:
    return [Line(name, each[name]) for name in _DRAWN if each.get(name)]
