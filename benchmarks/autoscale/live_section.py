"""A live run of pools that follow their load beside its simulation, as a part of `docs/benchmarks.md` and its plot."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.line_plot import Line, Panel, svg
from benchmarks.text import wrapped

FORMAT = "tandem-autoscale-live/1"
COMMAND = "`python -m benchmarks autoscale --live`"
PLOT = Path("docs/figures/autoscale_live.svg")

#: As labels; what was measured last, as in all plots.
_WANTED, _READY = "wanted", "ready"
_Sizes = Sequence[tuple[float, int, int]]


def section(content: dict[str, Any]) -> Iterator[str]:
    """What the live run was, and how its pools went."""
    plan, live, said = content["plan"], content["live"], content["simulated"]
    phases = ", ".join(f"{rate:g} a second for {seconds:g} s" for rate, seconds in plan["phases"])
    most = " and ".join(f"1 to {num} {role}" for role, num in plan["most"].items())
    yield ""
    yield "### On nodes that come and go, live and simulated"
    yield ""
    yield from wrapped(
        f"Measured by {COMMAND} (sources {content['code']['digest']}): routers, workers, supervisor and law as they "
        "ship, on nodes that Ray's autoscaler starts as processes of one host and ends, of the types prefill and "
        "decode; only steps take the time that a model of them says, and compute nothing. "
        f"{content['num_requests']} requests of {plan['num_input']} + {plan['num_output']} tokens come by chance: "
        f"{phases}. {most} workers, `pools.shrink_delay_s: {plan['shrink_delay_s']:g}`. The simulation has the same "
        "requests at the same times, the same settings, and workers that start in the "
        f"{content['start_s']:.0f} s that they took live (the median of {len(content['starts_s'])}, from "
        f"{min(content['starts_s']):.0f} to {max(content['starts_s']):.0f} s, in which Ray's node starts, too)."
    )
    yield ""
    yield "| pool | sizes that were wanted, live | simulated | ready at most, live |"
    yield "|---|---|---|---:|"
    for role in plan["most"]:
        ways = (_way(found["sizes"][role]) for found in (live, said))
        num = max(ready for _, _, ready in live["sizes"][role])
        yield f"| {role} | {' | '.join(ways)} | {num} |"
    yield ""
    nodes = [num for _, num in live["nodes"]]
    yield from wrapped(
        f"{sum(live['failures'].values()) or 'None'} of the requests failed; {live['kept_share']:.1%} kept their "
        f"targets. In the simulation {sum(said['failures'].values()) or 'none'} failed, and "
        f"{said['kept_share']:.1%} kept them. There were {max(nodes)} nodes at most, and {nodes[-1]} "
        "at the end. What else the host did was not controlled: a busy one makes starts longer, and then requests "
        "are late, or refused."
    )
    yield ""
    yield f"![Workers of both pools over time, live and simulated](figures/{PLOT.name})"


def _way(sizes: _Sizes) -> str:
    """Wanted sizes, one after the other."""
    found = [wanted for _, wanted, _ in sizes]
    return " → ".join(str(num) for at, num in enumerate(found) if not at or num != found[at - 1])


def plot(content: dict[str, Any]) -> str:
    """An SVG: a panel for each pool, both runs."""
    live, said = content["live"]["sizes"], content["simulated"]["sizes"]
    end_s = max(sizes[-1][0] for each in (live, said) for sizes in each.values())
    panels = []
    for role in content["plan"]["most"]:
        lines = [
            Line(f"{kind}, {name}", _stairs(sizes[role], place, end_s))
            for name, sizes in (("simulated", said), ("live", live))
            for place, kind in ((1, _WANTED), (2, _READY))
        ]
        panels.append(Panel(f"{role} workers", "seconds", lines, is_linear=True))
    return svg(panels)


def _stairs(sizes: _Sizes, place: int, end_s: float) -> list[tuple[float, float]]:
    """Corners of the line of one of the two figures of `sizes`."""
    found: list[tuple[float, float]] = []
    for size in sizes:
        at_s, num = max(0.0, size[0]), size[place]
        if found and found[-1][1] != num:
            found.append((at_s, found[-1][1]))
        if not found or found[-1][1] != num:
            found.append((at_s, num))
    return [*found, (end_s, found[-1][1])]
