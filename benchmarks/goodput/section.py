"""The section of goodput in docs/benchmarks.md: a row for each mix and type, measured or not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.goodput.figures import Content, alone_ttft_s, reference
from benchmarks.goodput.load import SHARE
from benchmarks.goodput.mixes import MIXES, SPREAD, Mix
from benchmarks.goodput.points import ALONE, TYPES, Point
from benchmarks.goodput.slo import LENGTHS, SloByPrompt
from benchmarks.grid.figures import COLOCATED, PEER, TANDEM, geometric_mean
from benchmarks.peers.figures import GOODPUT_GOAL, Run
from benchmarks.peers.goodput_figures import goodput_ratio, goodput_ratio_words, open_end
from benchmarks.peers.origin import TITLES, codes_of, hardware_words, hours, listed, reservations
from benchmarks.text import wrapped

COMMAND = "`make bench-goodput`"
NOT_MEASURED = "not measured"
_SERVERS = (TANDEM, COLOCATED, PEER)


def section(contents: Sequence[Content]) -> Iterator[str]:
    """Of the files that there are; without any it says how they come to be."""
    found = {Point(**content["settings"]["point"]): content for content in contents}
    yield ""
    yield "## Goodput on mixes of prompts"
    yield ""
    if not found:
        yield from wrapped(
            f"No goodput on mixes was measured yet: {COMMAND} does, and `make docs` then puts the figures here."
        )
        return
    yield from wrapped(_introduction(list(found.values())))
    yield from reservations([item for content in contents for item in (*content["runs"], *content["goodput"])])
    yield ""
    yield from _rates(found)
    yield from _mixes()
    yield from _alone(found)


def _introduction(contents: Sequence[Content]) -> str:
    items = [item for content in contents for item in (*content["runs"], *content["goodput"])]
    dates = sorted(item["date"][:10] for item in items)
    when = dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
    settings: dict[str, Any] = {}
    for content in contents:  # the first may have been measured without vLLM
        settings |= content["settings"]
    peer = f", vLLM with {listed(settings['peer_versions'])}" if "peer_versions" in settings else ""
    slo = SloByPrompt(())
    return (
        f"The highest rate of Poisson arrivals, in requests/s, at which {SHARE:.0%} of all requests keep both targets: "
        f"a TTFT of at most {slo.factor:g} times that of such a prompt alone plus {slo.slack_s:g} s, and a TPOT of at "
        f"most {slo.tpot_s * 1e3:g} ms. The same targets hold for all servers: alone is as below, on vLLM where it was "
        f"measured. Measured by {COMMAND} on {when}, on {hardware_words(settings['machine'])}; Tandem at "
        f"{', '.join(codes_of(TANDEM, items))}{peer}. Tandem is one prefill and one decode worker, Tandem colocated "
        "two workers of which each computes its prompts itself. One search of each, so nothing is known of the spread; "
        "≥ where no rate was found that is too high, < where none was kept, and in brackets where the time of the "
        f"search was up before it knew better. Searches that lie more than {hours()} apart have no ratio."
    )


def _rates(found: dict[Point, Content]) -> Iterator[str]:
    titles = [TITLES[name] for name in _SERVERS]
    yield f"| mix | type | {' | '.join(titles)} | {titles[0]} over vLLM | goal | over colocated |"
    yield f"|---|---|{'---|' * (len(titles) + 3)}"
    ratios, num_judged, num_reached = [], 0, 0
    for mix in MIXES:
        for dtype in TYPES:
            content = found.get(Point(mix.name, dtype))
            searches = {search["contestant"]: search for search in content["goodput"]} if content else {}
            precision = content["settings"]["goodput"]["precision"] if content else 1.0
            ours, peer, colocated = (searches.get(name) for name in (TANDEM, PEER, COLOCATED))
            over_peer, judgement, over_colocated = "", "", ""
            if ours is not None and peer is not None:
                over_peer, judgement = goodput_ratio_words(ours, peer, GOODPUT_GOAL)
                ratio = goodput_ratio(ours, peer)
                if ratio and not open_end(ours) + open_end(peer):  # a bound is no ratio
                    ratios.append(ratio)
                num_judged, num_reached = num_judged + bool(judgement), num_reached + judgement.endswith(": reached")
            if ours is not None and colocated is not None:
                over_colocated, _ = goodput_ratio_words(ours, colocated, None)
            rates = [_rate(searches.get(name), precision) for name in _SERVERS]
            yield f"| {mix.name} | {dtype} | {' | '.join([*rates, over_peer, judgement, over_colocated])} |"
    if num_judged:
        yield ""
        mean = f"; the geometric mean of the ratios that are known is {geometric_mean(ratios):.2f}" if ratios else ""
        goal = f"The goal, {GOODPUT_GOAL.bound:g} times vLLM's"
        yield from wrapped(f"{goal}, is reached in {num_reached} of {num_judged}{mean}.")


def _rate(search: Run | None, precision: float) -> str:
    if search is None:
        return NOT_MEASURED
    best, worst = search["goodput_per_s"], search["failed_from_per_s"]
    if not best:
        return f"< {worst:.2f}"
    is_close = worst is None or worst <= best * precision
    return f"{open_end(search)}{best:.2f}" + ("" if is_close else f" (fails from {worst:.2f})")


def _mixes() -> Iterator[str]:
    yield ""
    yield from wrapped(
        "Mean lengths of the mixes, in tokens; each request's own are drawn evenly from "
        f"{1 - SPREAD:g} to {1 + SPREAD:g} times these, the same ones in the same order for all servers."
    )
    yield ""
    yield "| mix | requests: prompt / output |"
    yield "|---|---|"
    for mix in MIXES:
        yield f"| {mix.name} | {_kinds(mix)} |"


def _kinds(mix: Mix) -> str:
    return ", ".join(
        ("all" if len(mix.kinds) == 1 else f"{kind.count} of {mix.num_a_round}")
        + f": {kind.num_input:,} / {kind.num_output:,}"
        for kind in mix.kinds
    )


def _alone(found: dict[Point, Content]) -> Iterator[str]:
    yield ""
    yield "Requests alone: median TTFT in ms, by tokens of the prompt; **bold** is what the targets are made of."
    yield ""
    yield f"| server | type | {' | '.join(f'{length:,}' for length in LENGTHS)} |"
    yield f"|---|---|{'---|' * len(LENGTHS)}"
    for dtype in TYPES:
        content = found.get(Point(ALONE, dtype))
        whose = reference(run["contestant"] for run in content["runs"]) if content else None
        for name in _SERVERS:
            alone = dict(alone_ttft_s(content, name)) if content else {}
            cells = [f"{alone[length] * 1e3:,.0f}" if length in alone else NOT_MEASURED for length in LENGTHS]
            cells = [f"**{cell}**" if name == whose and cell != NOT_MEASURED else cell for cell in cells]
            yield f"| {TITLES[name]} | {dtype} | {' | '.join(cells)} |"
