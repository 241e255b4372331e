"""Lines in panels beside each other, as an SVG: the same data give the same bytes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

_WIDTH, _HEIGHT = 430, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 14, 32, 40
_LEGEND = 20
_LETTER = 6.6  # of the legend, a wide one
_COLOURS = ("#b0b0b0", "#e08a1e", "#2a6fdb", "#3a9d5d")
# Where the largest value is so many times the smallest, a linear axis would show of the others that they are small.
_LOGARITHMIC_FROM = 30


@dataclass(frozen=True, slots=True)
class Line:
    """Points are of numbers of the panel's x axis, or of indices of its labels."""

    label: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Panel:
    """Attributes:
    x_labels: of evenly spaced values; empty: the axis is of numbers, from 0 on.
    is_linear: also where values lie far apart.
    """

    title: str
    x_title: str
    lines: Sequence[Line]
    x_labels: Sequence[str] = ()
    is_linear: bool = False


def svg(panels: Sequence[Panel], columns: int = 0) -> str:
    """The lines of one label have one colour in all panels, and all labels stand below them. `columns`: so many panels
    stand beside each other; 0: all do."""
    columns = columns or len(panels)
    labels = list(dict.fromkeys(line.label for panel in panels for line in panel.lines))
    colours = dict(zip(labels, _colours(len(labels)), strict=True))
    width, bottom = _WIDTH * columns, _HEIGHT * -(-len(panels) // columns)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {bottom + _LEGEND}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{width}" height="{bottom + _LEGEND}" fill="white"/>',
    ]
    for number, panel in enumerate(panels):
        left, top = number % columns * _WIDTH, number // columns * _HEIGHT
        lines += [f'<g transform="translate({left} {top})">', *_panel(panel, colours), "</g>"]
    return "\n".join([*lines, *_legend(colours, bottom + 8), "</svg>"]) + "\n"


def _colours(num: int) -> Sequence[str]:
    """The last ones: what ships stands last, and has the same colour wherever three or fewer are compared."""
    if num > len(_COLOURS):
        raise ValueError(f"{num} lines are too many to tell apart; draw {len(_COLOURS)}")
    return _COLOURS[max(0, 3 - num) :][:num]


def _legend(colours: dict[str, str], y: int) -> Iterator[str]:
    x = float(_LEFT)
    for label, colour in colours.items():
        yield f'<line x1="{x}" x2="{x + 18}" y1="{y}" y2="{y}" stroke="{colour}" stroke-width="2"/>'
        yield f'<text x="{x + 24}" y="{y + 4}">{escape(label)}</text>'
        x = round(x + 24 + _LETTER * len(label) + 20, 1)


def _panel(panel: Panel, colours: dict[str, str]) -> Iterator[str]:
    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    values = [y for line in panel.lines for _, y in line.points]
    axis = _Axis.of(values, is_linear=panel.is_linear)
    numbers = [x for line in panel.lines for x, _ in line.points]
    last_x = len(panel.x_labels) - 1 if panel.x_labels else max(numbers)
    inset = 14 if panel.x_labels else 0

    def at_x(x: float) -> float:
        return round(_LEFT + inset + x / (last_x or 1) * (right - _LEFT - 2 * inset), 1)

    def at_y(y: float) -> float:
        return round(bottom - axis.share(y) * (bottom - _TOP), 1)

    yield f'<text x="{_LEFT}" y="18">{escape(panel.title)}</text>'
    for tick in axis.ticks:
        y = at_y(tick)
        yield f'<line x1="{_LEFT}" x2="{right}" y1="{y}" y2="{y}" stroke="#e4e4e4"/>'
        yield f'<text x="{_LEFT - 6}" y="{y + 4}" text-anchor="end">{tick:,.10g}</text>'
    marks = list(enumerate(panel.x_labels)) if panel.x_labels else [(x, f"{x:,.10g}") for x in _ticks(last_x)]
    for x, text in marks:
        yield f'<text x="{at_x(x)}" y="{bottom + 16}" text-anchor="middle">{escape(text)}</text>'
    yield f'<text x="{(_LEFT + right) / 2}" y="{bottom + 33}" text-anchor="middle">{escape(panel.x_title)}</text>'
    for line in panel.lines:
        colour = colours[line.label]
        points = " ".join(f"{at_x(x)},{at_y(y)}" for x, y in line.points)
        yield f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>'
        if panel.x_labels:
            for x, y in line.points:
                yield f'<circle cx="{at_x(x)}" cy="{at_y(y)}" r="3" fill="{colour}">'
                yield f"<title>{escape(line.label)}, {escape(panel.x_labels[int(x)])}: {y:,.4g}</title></circle>"


@dataclass(frozen=True, slots=True)
class _Axis:
    """From 0 to the last tick; or by powers of ten, where `least` is above 0."""

    ticks: Sequence[float]
    least: float = 0.0

    @classmethod
    def of(cls, values: Sequence[float], *, is_linear: bool) -> _Axis:
        least, most = min(values), max(values)
        if not is_linear and least > 0 and most / least >= _LOGARITHMIC_FROM:
            powers = range(math.floor(math.log10(least)), math.ceil(math.log10(most)) + 1)
            return cls([10.0**power for power in powers], 10.0 ** powers[0])
        return cls(_ticks(most, beyond=True))

    def share(self, value: float) -> float:
        """0 at the foot of the axis, 1 at its top."""
        top = self.ticks[-1]
        if self.least:
            return math.log(value / self.least) / math.log(top / self.least)
        return value / top


def _ticks(most: float, *, beyond: bool = False) -> list[float]:
    """Round numbers from 0 up to `most`, about five; `beyond`: the last is not below it."""
    if most <= 0:
        return [0.0, 1.0]
    rough = most / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    num = math.ceil(most / step - 1e-9) if beyond else math.floor(most / step + 1e-9)
    return [round(number * step, 10) for number in range(num + 1)]
