"""The section of goodput in docs/benchmarks.md: a row for each mix and type, measured or not."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

from benchmarks.goodput.figures import Content, alone_ttft_s, reference
from benchmarks.goodput.load import SHARE
from benchmarks.goodput.mixes import MIXES, SPREAD, Mix
from benchmarks.goodput.points import ALONE, TYPES, Point
from benchmarks.goodput.slo import LENGTHS, SloByPrompt
from benchmarks.grid.figures import COLOCATED, PEER, TANDEM, geometric_mean
from benchmarks.peers.figures import GOODPUT_GOAL, Run
from benchmarks.peers.goodput_figures import GoodputRatio, rate_words, ratio_words
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
    others = _with_other_targets(found)
    lines = reservations([item for content in contents for item in (*content["runs"], *content["goodput"])])
    yield from lines
    if others:
        if not lines:
            yield ""
        names = _names(others)
        yield f"- **Warning**: measured with other targets than the requests alone below make: {names}. The goal's"
        yield "  count and the mean leave these out."
    yield ""
    yield from _rates(found, others)
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
        f"measured. {_told_words(contents)} "
        f"Measured by {COMMAND} on {when}, on {hardware_words(settings['machine'])}; Tandem at "
        f"{', '.join(codes_of(TANDEM, items))}{peer}. Tandem is one prefill and one decode worker, Tandem colocated "
        "two workers of which each computes its prompts itself. One search of each, so nothing is known of the spread; "
        "≥ where no rate was found that is too high, < where none was kept, and in brackets from which rate it fails "
        "where the time of the search was up before it knew better. A ratio lies between the bounds beside it, by the "
        "highest rates that were kept and the lowest that were not; the goal is judged where both bounds are on one "
        f"side of it. Searches that lie more than {hours()} apart have no ratio."
    )


def _names(points: Collection[Point]) -> str:
    return ", ".join(f"{point.mix} in {point.dtype}" for point in points)


def _told_words(contents: Sequence[Content]) -> str:
    """On which mixes servers knew the targets."""
    mixes = [content["settings"] for content in contents if content["settings"]["point"]["mix"] != ALONE]
    told = [Point(**settings["point"]) for settings in mixes if "told_s" in settings["goodput"]]
    if not told:
        return "No server was told these targets."
    which = "" if len(told) == len(mixes) else f", on {_names(told)}"
    return (
        f"Tandem was told (`slo`) the TPOT and the TTFT of the longest kind's mean prompt{which}; vLLM has no such "
        "setting."
    )


def _with_other_targets(found: dict[Point, Content]) -> list[Point]:
    """Mixes whose targets are not those that the file of requests alone gives now, or of which there is no such file:
    it was measured anew since, or what it held of older code is gone."""
    return [
        point
        for point, content in found.items()
        if point.mix != ALONE and content["settings"]["goodput"]["alone_ttft_s"] != _targets(found.get(point.alone))
    ]


def _targets(content: Content | None) -> dict[str, float]:
    """Of a file of requests alone, as the settings of a mix have them; empty: it has none."""
    whose = _whose(content)
    if content is None or whose is None:
        return {}
    return {str(num_input): ttft_s for num_input, ttft_s in alone_ttft_s(content, whose)}


def _whose(content: Content | None) -> str | None:
    """By whose requests alone all are judged; `None`: none was measured."""
    return reference(run["contestant"] for run in content["runs"]) if content else None


def _rates(found: dict[Point, Content], others: Collection[Point]) -> Iterator[str]:
    titles = [TITLES[name] for name in _SERVERS]
    yield f"| mix | type | {' | '.join(titles)} | {titles[0]} over vLLM | goal | over colocated |"
    yield f"|---|---|{'---|' * (len(titles) + 3)}"
    ratios: list[GoodputRatio] = []
    for mix in MIXES:
        for dtype in TYPES:
            point = Point(mix.name, dtype)
            content = found.get(point)
            searches = {search["contestant"]: search for search in content["goodput"]} if content else {}
            precision = content["settings"]["goodput"]["precision"] if content else 1.0
            ours, peer, colocated = (searches.get(name) for name in (TANDEM, PEER, COLOCATED))
            over_peer, judgement, over_colocated = "", "", ""
            if ours is not None and peer is not None:
                ratio = GoodputRatio.of(ours, peer, precision)
                over_peer, judgement = ratio_words(ratio, GOODPUT_GOAL)
                if ratio is not None and point not in others:
                    ratios.append(ratio)
            if ours is not None and colocated is not None:
                over_colocated, _ = ratio_words(GoodputRatio.of(ours, colocated, precision), None)
            rates = [_rate(searches.get(name), precision) for name in _SERVERS]
            yield f"| {mix.name} | {dtype} | {' | '.join([*rates, over_peer, judgement, over_colocated])} |"
    if ratios:
        yield ""
        yield from wrapped(_sum_of(ratios))


def _sum_of(ratios: Sequence[GoodputRatio]) -> str:
    """In how many the goal is reached, and their mean, of at least one."""
    judgements = [ratio.judged(GOODPUT_GOAL) for ratio in ratios]
    num_reached, num_undecided = (
        sum(judgement.endswith(end) for judgement in judgements) for end in (": reached", ": undecided")
    )
    known = [ratio.best for ratio in ratios if ratio.best is not None]
    text = f"The goal, {GOODPUT_GOAL.bound:g} times vLLM's, is reached in {num_reached} of {len(ratios)}"
    text += f", undecided in {num_undecided}." if num_undecided else "."
    if known:
        text += f" The geometric mean of the ratios that are known is {geometric_mean(known):.2f}."
    if known and len(known) < len(ratios):
        text += f" {len(ratios) - len(known)} of {len(ratios)} are known too roughly and are not in it."
    return text


def _rate(search: Run | None, precision: float) -> str:
    return NOT_MEASURED if search is None else rate_words(search, precision)


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
        whose = _whose(content)
        for name in _SERVERS:
            alone = dict(alone_ttft_s(content, name)) if content else {}
            cells = [f"{alone[length] * 1e3:,.0f}" if length in alone else NOT_MEASURED for length in LENGTHS]
            cells = [f"**{cell}**" if name == whose and cell != NOT_MEASURED else cell for cell in cells]
            yield f"| {TITLES[name]} | {dtype} | {' | '.join(cells)} |"
