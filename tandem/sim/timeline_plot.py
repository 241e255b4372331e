"""Draws what each worker of a simulation did over time: a page that needs nothing but itself, or a picture."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from tandem.core.errors import ConfigError
from tandem.core.identity import WORKER_ROLES
from tandem.sim.fleet import Life
from tandem.sim.outcome import Outcome
from tandem.sim.timeline import Timeline

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing

SUFFIXES = (".html", ".png")

_COLUMNS, _COLUMN = 500, 2  # and how wide each is
_LEFT, _RIGHT, _TOP, _STRIP, _GAP = 90, 60, 24, 60, 3
_MOST_HEIGHT = 1200
_LEVELS = 8  # of a worker's busy share, that are told apart

_STYLE = """
:root { color-scheme: light dark; --bg: #f6f7f9; --card: #fff; --ink: #1c2430; --dim: #647084; --line: #dfe4ea;
  --prompts: #2f7ed8; --tokens: #e8833a; --wait: #9aa5b4; }
@media (prefers-color-scheme: dark) { :root { --bg: #11151b; --card: #1a2029; --ink: #e4e9f0; --dim: #93a0b3;
  --line: #2b3440; --prompts: #5a9fee; --tokens: #f09a5a; --wait: #6b7687; } }
body { margin: 16px; background: var(--bg); color: var(--ink); font: 14px/1.45 system-ui, sans-serif; }
svg { display: block; width: 100%; background: var(--card); border: 1px solid var(--line); border-radius: 8px; }
text { fill: var(--dim); font: 10px system-ui, sans-serif; font-variant-numeric: tabular-nums; }
.legend { display: flex; gap: 14px; flex-wrap: wrap; color: var(--dim); margin: 8px 0; }
.legend i { display: inline-block; width: 10px; height: 10px; border-radius: 2px; margin-right: 4px; }
"""


@dataclass(frozen=True)
class Drawn:
    """What is drawn; `end_s`: of the simulation."""

    title: str
    timeline: Timeline
    lives: Sequence[Life]
    outcomes: Sequence[Outcome]
    end_s: float

    def ordered(self) -> list[Life]:
        """By role, in the order in which they were asked for."""
        by_role = {role: number for number, role in enumerate(WORKER_ROLES)}
        numbered = sorted(enumerate(self.lives), key=lambda each: (by_role[each[1].role], each[0]))
        return [life for _, life in numbered]

    def shares(self, life: Life) -> list[tuple[float, float]]:
        return self.timeline.shares(life.key.worker_id, _COLUMNS, self.end_s)

    def under_way(self) -> tuple[list[int], list[int]]:
        """Requests that have come and not ended, and of these those without a first token, at each column's end."""
        came, first, ended = ([0] * (_COLUMNS + 1) for _ in range(3))
        for one in self.outcomes:
            moments = one.arrival.arrived_s, one.first_token_s, one.last_token_s
            for counts, at_s in zip((came, first, ended), moments, strict=True):
                counts[min(_COLUMNS - 1, int(at_s / self.end_s * _COLUMNS))] += 1
        num, num_waiting, all_, waiting = 0, 0, [], []
        for number in range(_COLUMNS):
            num += came[number] - ended[number]
            num_waiting += came[number] - first[number]
            all_.append(num)
            waiting.append(num_waiting)
        return all_, waiting


def write(path: Path, drawn: Drawn) -> None:
    """As the name's end says, one of `SUFFIXES`. Raises `ConfigError`: it cannot be written, or a picture not drawn."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".png":
            _picture(drawn).savefig(path, dpi=150)
        else:
            path.write_text("\n".join(_page(drawn)) + "\n")
    except OSError as error:
        raise ConfigError(f"the timeline cannot be written to {path}: {error.strerror}", key="--timeline") from error


# --- a page -----------------------------------------------------------------------------------------------------------


def _page(drawn: Drawn) -> Iterator[str]:
    title = html.escape(drawn.title)
    lives = drawn.ordered()
    height = max(3, min(20, (_MOST_HEIGHT - _STRIP) // max(1, len(lives)) - _GAP))
    width = _LEFT + _COLUMNS * _COLUMN + _RIGHT
    bottom = _TOP + _STRIP + len(lives) * (height + _GAP) + _GAP
    yield f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield f"<style>{_STYLE}</style></head><body><h1>{title}</h1>"
    yield '<div class="legend"><span><i style="background:var(--prompts)"></i>computes prompts</span>'
    yield '<span><i style="background:var(--tokens)"></i>generates only</span>'
    yield '<span><i style="background:var(--line)"></i>starts, or ends what it has</span>'
    yield "<span>above: requests under way, and of these those without a first token</span></div>"
    yield f'<svg viewBox="0 0 {width} {bottom + 16}" role="img" aria-label="What each worker did over time">'
    yield from _requests(drawn)
    for number, life in enumerate(lives):
        yield from _row(drawn, life, _TOP + _STRIP + number * (height + _GAP), height)
    for share in range(6):
        x = _LEFT + share * _COLUMNS * _COLUMN // 5
        yield f'<line x1="{x}" x2="{x}" y1="{_TOP}" y2="{bottom}" stroke="var(--line)" stroke-dasharray="2 4"/>'
        yield f'<text x="{x}" y="{bottom + 12}" text-anchor="middle">{_clock(drawn.end_s * share / 5)}</text>'
    yield "</svg></body></html>"


def _requests(drawn: Drawn) -> Iterator[str]:
    all_, waiting = drawn.under_way()
    most = max(1, *all_)
    yield f'<text x="{_LEFT}" y="{_TOP - 8}">at most {most:,} requests under way</text>'
    for counts, colour in ((all_, "--wait"), (waiting, "--prompts")):
        top = [f"{_LEFT + n * _COLUMN},{_y(count / most)}" for n, count in enumerate(counts)]
        corners = f"{_LEFT},{_y(0)} {' '.join(top)} {_LEFT + (_COLUMNS - 1) * _COLUMN},{_y(0)}"
        yield f'<polygon points="{corners}" fill="var({colour})" fill-opacity="0.7"/>'


def _y(share: float) -> float:
    return round(_TOP + (1 - share) * (_STRIP - 10), 1)


def _row(drawn: Drawn, life: Life, top: int, height: int) -> Iterator[str]:
    shares, name = drawn.shares(life), life.key.worker_id
    gone_s = life.gone_s if life.gone_s is not None else drawn.end_s
    lived_s = max(1e-9, gone_s - (life.ready_s or 0.0))
    of_column_s = drawn.end_s / _COLUMNS
    prompts, tokens = (sum(share[kind] for share in shares) * of_column_s / lived_s for kind in (0, 1))
    yield f"<g><title>{name}: computed prompts {prompts:.0%} of its time, only generated {tokens:.0%}</title>"
    yield f'<rect x="{_LEFT}" y="{top}" width="{_COLUMNS * _COLUMN}" height="{height}" fill="none"/>'
    not_serving = [(life.asked_s, life.ready_s if life.ready_s is not None else gone_s)]
    if life.left_s is not None:
        not_serving.append((life.left_s, gone_s))
    for from_s, to_s in not_serving:
        if to_s > from_s:
            x, width = (_COLUMNS * _COLUMN * seconds / drawn.end_s for seconds in (from_s, to_s - from_s))
            yield f'<rect x="{_LEFT + x:.1f}" y="{top}" width="{width:.1f}" height="{height}" fill="var(--line)"/>'
    levels = [(round(of_prompts * _LEVELS), round(of_tokens * _LEVELS)) for of_prompts, of_tokens in shares]
    for kind, colour in ((0, "--prompts"), (1, "--tokens")):
        if path := "".join(_cells(levels, kind, top, height)):
            yield f'<path d="{path}" fill="var({colour})"/>'
    if height >= 8:
        yield f'<text x="{_LEFT - 6}" y="{top + height / 2 + 3.5}" text-anchor="end">{name}</text>'
        x = _LEFT + _COLUMNS * _COLUMN + 6
        yield f'<text x="{x}" y="{top + height / 2 + 3.5}">{prompts + tokens:.0%}</text>'
    yield "</g>"


def _cells(levels: Sequence[tuple[int, int]], kind: int, top: int, height: int) -> Iterator[str]:
    """Generating from the bottom up, prompts above it; neighbours that are alike are one."""
    x = _LEFT
    for (of_prompts, of_tokens), alike in groupby(levels):
        width = _COLUMN * sum(1 for _ in alike)
        below, level = (of_tokens, of_prompts) if kind == 0 else (0, of_tokens)
        if level:
            bottom = top + height - height * min(below, _LEVELS) / _LEVELS
            tall = height * min(level, _LEVELS - below) / _LEVELS
            yield f"M{x} {bottom - tall:.4g}h{width}v{tall:.4g}h-{width}z"
        x += width


def _clock(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} min" if seconds < 7200 else f"{seconds / 3600:.3g} h"


# --- a picture --------------------------------------------------------------------------------------------------------

_BLANK, _PROMPTS, _TOKENS = (0.97, 0.97, 0.98), (0.18, 0.49, 0.85), (0.91, 0.51, 0.23)


def _picture(drawn: Drawn) -> Drawing:
    from tandem.bench.report.plot import new_figure

    lives = drawn.ordered()
    drawing = new_figure(height=min(12.0, 2.5 + 0.16 * len(lives)))
    above, below = drawing.subplots(2, 1, sharex=True, height_ratios=[1, max(2, len(lives) // 4)])
    times = [drawn.end_s * (number + 1) / _COLUMNS for number in range(_COLUMNS)]
    for counts, label in zip(drawn.under_way(), ("under way", "without a first token"), strict=True):
        above.fill_between(times, counts, alpha=0.6, step="pre", label=label)
    above.set_ylabel("requests")
    above.legend(fontsize="small", loc="upper right")
    image = [[_mixed(*share) for share in drawn.shares(life)] for life in lives]
    below.imshow(image, aspect="auto", interpolation="nearest", extent=(0, drawn.end_s, len(lives), 0))
    step = max(1, len(lives) // 40)
    names = [(number + 0.5, life.key.worker_id) for number, life in enumerate(lives)][::step]
    below.set_yticks([at for at, _ in names], [name for _, name in names], fontsize="x-small")
    below.set_xlabel("seconds; blue: computes prompts, orange: generates only")
    drawing.suptitle(drawn.title)
    return drawing


def _mixed(prompts: float, tokens: float) -> tuple[float, ...]:
    idle = max(0.0, 1 - prompts - tokens)
    mixed = (idle * a + prompts * b + tokens * c for a, b, c in zip(_BLANK, _PROMPTS, _TOKENS, strict=True))
    return tuple(min(1.0, value) for value in mixed)
