"""Plots of measurements: latency against rate, ITL over time, TTFT by turn; PNG by matplotlib, one HTML file of all."""

from __future__ import annotations

import html
import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tandem.bench.report import results
from tandem.core.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_PANELS = (("TTFT", "ttft_s"), ("TPOT", "tpot_s"), ("ITL", "itl_s"))
_SHOWN = ("ttft_s", "tpot_s", "itl_s", "e2e_s")
_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>tandem bench</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; color: #222 }}
svg {{ width: 100%; height: auto }}
table {{ border-collapse: collapse }}
td, th {{ padding: .2rem .8rem; text-align: right; border-bottom: 1px solid #ddd }}
td:first-child, th:first-child {{ text-align: left }}
</style>
<h1>tandem bench</h1>
{sections}
</html>
"""


def plot_files(files: Sequence[Path], stem: Path) -> list[Path]:
    """Write `STEM-latency.png`, `STEM-itl.png`, of conversations `STEM-turns.png`, and `STEM.html`; the paths.

    Raises:
        ConfigError: a file is none of ours, holds nothing to plot, or matplotlib is not installed.
    """
    contents = {path: results.read(path) for path in files}
    titled = [(results.title(content, path), content) for path, content in contents.items()]
    if not any(_runs(content) for _, content in titled):
        raise ConfigError("no request succeeded in these files: there is nothing to plot")
    figures = {"latency": _latency(titled), "itl": _itl_over_time(titled)}
    if any(_turns(content) for _, content in titled):
        figures["turns"] = _ttft_by_turn(titled)
    try:
        stem.parent.mkdir(parents=True, exist_ok=True)
        written = []
        for name, figure in figures.items():
            written.append(stem.with_name(f"{stem.name}-{name}.png"))
            figure.savefig(written[-1], dpi=150)
        written.append(stem.with_name(f"{stem.name}.html"))
        written[-1].write_text(_page(titled, figures))
    except OSError as error:
        raise ConfigError(f"the plots cannot be written: {error}", key="--output") from error
    return written


def _runs(content: dict[str, Any]) -> list[dict[str, Any]]:
    """Those in which a request succeeded, by rising rate; stopped ones only where there is no other.

    A stopped run shows what ended soon, and so flatters the rate at which it was stopped.
    """
    runs = sorted((run for run in content["runs"] if run["figures"]["num_succeeded"]), key=_rate)
    return [run for run in runs if not run["is_partial"]] or runs


def _rate(run: dict[str, Any]) -> float:
    """Requests a second: as asked for, or as reached where the load set no rate."""
    return float(run["shape"]["rate"] or run["figures"]["requests_per_s"])


def _latency(titled: Sequence[tuple[str, dict[str, Any]]]) -> Figure:
    figure = new_figure(height=4.2)
    for axes, (title, attribute) in zip(figure.subplots(1, len(_PANELS)), _PANELS, strict=True):
        for number, (name, content) in enumerate(titled):
            points = [(_rate(run), run["figures"][attribute]) for run in _runs(content) if run["figures"][attribute]]
            _draw(axes, points, ("o-", "^--"), f"C{number}", name)
        _finish(axes, title, "requests/s")
    return figure


def _itl_over_time(titled: Sequence[tuple[str, dict[str, Any]]]) -> Figure:
    figure = new_figure(height=4.5)
    axes = figure.subplots()
    for number, (name, content) in enumerate(titled):
        run = _run_to_show(content)
        points = [(window["at_s"], window) for window in (run["figures"]["itl_windows"] if run else [])]
        _draw(axes, points, ("-", "--"), f"C{number}", name)
    _finish(axes, "ITL over time", "seconds since the run began")
    return figure


def _ttft_by_turn(titled: Sequence[tuple[str, dict[str, Any]]]) -> Figure:
    figure = new_figure(height=4.5)
    axes = figure.subplots()
    for number, (name, content) in enumerate(titled):
        points = [(turn["turn"], turn["ttft_s"]) for turn in _turns(content)]
        _draw(axes, points, ("o-", "^--"), f"C{number}", name)
    _finish(axes, "TTFT by turn", "turn of a conversation")
    return figure


def _turns(content: dict[str, Any]) -> list[dict[str, Any]]:
    """Of the run to show; none where it held no conversations."""
    run = _run_to_show(content)
    return [turn for turn in run["figures"].get("turns", ()) if turn["ttft_s"]] if run else []


def _draw(
    axes: Axes, points: Sequence[tuple[float, dict[str, Any]]], styles: tuple[str, str], color: str, name: str
) -> None:
    """The p50 and the p99 of each point's latencies, in milliseconds."""
    for statistic, style in zip(("p50", "p99"), styles, strict=True):
        values = [found[statistic] * 1e3 for _, found in points]
        axes.plot([x for x, _ in points], values, style, color=color, label=f"{name} {statistic}")


def _run_to_show(content: dict[str, Any]) -> dict[str, Any] | None:
    """Of a search the probe at its goodput, else the last."""
    runs = _runs(content)
    best = content.get("search", {}).get("goodput_per_s")
    return next((run for run in runs if run["shape"]["rate"] == best), runs[-1] if runs else None)


def new_figure(height: float) -> Figure:
    """Raises `ConfigError` where matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("plots need matplotlib: pip install 'tandem-serving[bench]'") from error
    return Figure(figsize=(12, height), layout="constrained")


def _finish(axes: Axes, title: str, x: str) -> None:
    axes.set_title(title)
    axes.set_xlabel(x)
    axes.set_ylabel("ms")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")


def _page(titled: Sequence[tuple[str, dict[str, Any]]], figures: dict[str, Figure]) -> str:
    sections = []
    for name, figure in figures.items():
        drawn = io.StringIO()
        figure.savefig(drawn, format="svg", metadata={"Title": name})
        sections.append(drawn.getvalue()[drawn.getvalue().index("<svg") :])
    sections += [section for name, content in titled for section in _table(name, content)]
    return _PAGE.format(sections="\n".join(sections))


def _table(name: str, content: dict[str, Any]) -> Iterator[str]:
    server, machine = content["server"], content["machine"]
    yield f"<h2>{html.escape(name)}</h2>"
    said = f"{server['model']} at {server['url']}, {content['date']}, {machine['cpu']}, {machine['num_cores']} cores"
    if results.is_simulated(content):
        said = f"{server['model']}, simulated, {content['date']}"
    yield f"<p>{html.escape(said)}{', partial' if content['was_interrupted'] else ''}</p>"
    heads = [
        "requests/s",
        "succeeded",
        "tokens/s",
        *(f"{a[:-2].upper()} {s}, ms" for a in _SHOWN for s in ("p50", "p99")),
    ]
    rows = ["".join(f"<th>{head}</th>" for head in heads)]
    for run in content["runs"]:
        found = run["figures"]
        cells = [f"{_rate(run):.3f}", f"{found['num_succeeded']} of {found['num_requests']}"]
        cells.append(f"{found['output_tokens_per_s']:.1f}")
        cells += [f"{found[a][s] * 1e3:.1f}" if found[a] else "" for a in _SHOWN for s in ("p50", "p99")]
        rows.append("".join(f"<td>{cell}</td>" for cell in cells))
    yield "<table>" + "\n".join(f"<tr>{row}</tr>" for row in rows) + "</table>"
