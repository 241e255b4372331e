"""The law beside the best constants, as a part of `docs/performance.md` and its plot."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.text import wrapped

FORMAT = "tandem-law/1"
COMMAND = "`python -m benchmarks law`"

GOAL = 0.95
# Where even the best constants keep the targets of fewer requests the load is beyond what the cluster can serve.
_SERVED = 0.5

_HOW = {
    "closed": "clients that ask again",
    "varying": "the same, lengths that vary",
    "open": "by chance",
    "changing": "kinds that change",
}


@dataclass(frozen=True, slots=True)
class Ratio:
    """A figure of a case over that of its best constants."""

    model: str
    case: str
    law: float
    before: float
    best: str  # the constants
    law_figure: float
    best_figure: float


def ratios(model: dict[str, Any], figure: str, hows: Sequence[str], *, served: bool = True) -> list[Ratio]:
    """Of all cases of these loads; for `kept_per_s` of those that some constants serve, or else of the others."""
    found = []
    for case in model["cases"]:
        constants = case["constants"]
        best = max(constants, key=lambda name: constants[name][figure])
        most = constants[best][figure]
        is_meant = figure != "kept_per_s" or (constants[best]["kept_share"] >= _SERVED) == served
        if case["how"] not in hows or not is_meant:
            continue
        law, before = case["law"][figure], constants[model["before"]][figure]
        found.append(Ratio(model["title"], case["name"], law / most, before / most, best, law, most))
    return found


def section(content: dict[str, Any]) -> Iterator[str]:
    """What was found, as Markdown."""
    settings, models = content["settings"], content["models"]
    targets = ", ".join(f"{model['tpot_s'] * 1e3:.0f} ms on {model['title']}" for model in models)
    befores = ", ".join(f"{model['before']} on {model['title']}" for model in models)
    yield from wrapped(
        f"Simulated by {COMMAND}, so the figures are of no machine (sources {content['code']['digest']}): one prefill "
        "and one decode worker, on the time models `scenarios/two_cores.yaml` (82 M weights, with the speeds that were "
        "measured of one thread) and `scenarios/h200.yaml` (8 B weights, a roofline). *The oracle* knows the load and "
        f"takes the best of {len(settings['constants'])} settings for it: decode computes no prompts, or takes them up "
        f"to a number of tokens in a step ({settings['constants'][1].split()[0]} to "
        f"{settings['constants'][-1].split()[0]}), whatever targets say; *before* are the constants that were the "
        f"defaults ({befores}); with both, prompts go where they go by the law. A request is kept that has its first "
        "token within three times what it takes alone and "
        f"half a second, and each further one within {targets} on average; the law is told these targets. Goodput is "
        "kept requests a second, of loads of which the oracle keeps at least half. Lengths that vary are from half to "
        "one and a half of what their load says. Where all are alike, a few clients go in step: all ask for prompts at "
        "once, when decode has nobody to disturb, and then all generate. Each time decode is rightly given a part of "
        "the prompts, and so they stay in step; where it computes none they spread, which is faster in the long run."
    )
    yield ""
    titles = "time model", "load", "figure", "points"
    columns = " | ".join(f"{whose} ÷ oracle: mean | least | ≥ {GOAL}" for whose in ("law", "before"))
    yield f"| {' | '.join(titles)} | {columns} |"
    yield f"|{'---|' * 10}"
    misses: list[tuple[str, str, Ratio]] = []
    for model in models:
        for how, title in _HOW.items():
            for figure, name in (("tokens_per_s", "output tokens/s"), ("kept_per_s", "goodput")):
                found = ratios(model, figure, [how])
                if not found:
                    continue
                cells = [model["title"], title, name, str(len(found))]
                for values in ([one.law for one in found], [one.before for one in found]):
                    num = sum(value >= GOAL for value in values)
                    cells += [f"{sum(values) / len(values):.2f}", f"{min(values):.2f}", f"{num} of {len(values)}"]
                yield f"| {' | '.join(cells)} |"
                misses += [(title, name, one) for one in found if one.law < GOAL]
    yield ""
    beyond = [one for model in models for one in ratios(model, "kept_per_s", tuple(_HOW), served=False)]
    if beyond:
        num = sum(one.law >= GOAL for one in beyond)
        yield from wrapped(
            f"Of {len(beyond)} loads the oracle keeps less than half: which few requests meet their targets there is "
            f"chance for the most part. The law keeps at least {GOAL} of the oracle's on {num} of them, and "
            f"{sum(one.law_figure for one in beyond) / sum(one.best_figure for one in beyond):.2f} of them all."
        )
        yield ""
    if not misses:
        yield from wrapped("Goal: at least 0.95 of the oracle on every point: **reached**.")
        return
    yield from wrapped(f"Goal: at least 0.95 of the oracle on every point: **missed** on {len(misses)}:")
    yield ""
    yield "| time model | load | | figure | law | oracle | law ÷ oracle | the oracle's constants |"
    yield "|---|---|---|---|---|---|---|---|"
    for how, name, one in sorted(misses, key=lambda each: each[-1].law):
        figures = f"{one.law_figure:,.4g} | {one.best_figure:,.4g} | {one.law:.2f}"
        yield f"| {one.model} | {one.case} | {how} | {name} | {figures} | {one.best} |"


# --- the plot -----------------------------------------------------------------------------------------------------

_WIDTH, _HEIGHT, _LEFT, _TOP, _GAP = 860, 250, 50, 34, 40
_LEAST, _MOST = 0.4, 1.1
_LAW, _BEFORE = "#2a6fdb", "#b0b0b0"


def plot(content: dict[str, Any]) -> str:
    """An SVG: output tokens/s of each point over those of its best constants, one panel for each time model, sorted by
    the law's."""
    models = content["models"]
    height = len(models) * (_HEIGHT + _GAP) + 20
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
    ]
    for number, model in enumerate(models):
        lines += _panel(model, number * (_HEIGHT + _GAP))
    return "\n".join([*lines, "</svg>"]) + "\n"


def _panel(model: dict[str, Any], top: int) -> Iterator[str]:
    found = sorted(ratios(model, "tokens_per_s", tuple(_HOW)), key=lambda one: (one.law, one.before, one.case))
    bottom, right = top + _HEIGHT, _WIDTH - 10

    def y(value: float) -> float:
        within = min(max(value, _LEAST), _MOST)
        return round(bottom - (within - _LEAST) / (_MOST - _LEAST) * (_HEIGHT - _TOP), 1)

    title = f"{model['title']}: output tokens/s ÷ the best constants of each point"
    yield f'<text x="{_LEFT}" y="{top + 18}">{title}</text>'
    yield f'<circle cx="{right - 230}" cy="{top + 14}" r="4" fill="{_LAW}"/>'
    yield f'<text x="{right - 220}" y="{top + 18}">the law</text>'
    yield f'<circle cx="{right - 150}" cy="{top + 14}" r="4" fill="{_BEFORE}"/>'
    yield f'<text x="{right - 140}" y="{top + 18}">before ({model["before"]})</text>'
    for tenths in range(4, 12):
        at = y(tenths / 10)
        yield f'<line x1="{_LEFT}" x2="{right}" y1="{at}" y2="{at}" stroke="#e4e4e4"/>'
        yield f'<text x="{_LEFT - 8}" y="{at + 4}" text-anchor="end">{tenths / 10:.1f}</text>'
    yield f'<line x1="{_LEFT}" x2="{right}" y1="{y(GOAL)}" y2="{y(GOAL)}" stroke="#c33" stroke-dasharray="4 3"/>'
    for number, one in enumerate(found):
        x = round(_LEFT + (number + 0.5) * (right - _LEFT) / len(found), 1)
        for value, colour in ((one.before, _BEFORE), (one.law, _LAW)):
            yield f'<circle cx="{x}" cy="{y(value)}" r="3.5" fill="{colour}">'
            yield f"<title>{one.case}: {value:.2f}</title></circle>"
