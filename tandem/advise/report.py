"""A measurement of clusters as tables, sentences, plain data and a plot."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from tandem.advise.clusters import Cluster
from tandem.advise.measure import AdviceRun
from tandem.advise.verdict import FIGURES, Figure, Measured, Verdict
from tandem.bench.load.records import Slo
from tandem.bench.repetitions import spread
from tandem.bench.report.plot import new_figure
from tandem.core.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FORMAT = "tandem-advice/1"

_FEW, _NEARLY_ALL = 0.9, 0.99  # of the requests, that keep the targets


def by_cluster(clusters: Sequence[Cluster], runs: Sequence[AdviceRun]) -> dict[Cluster, list[AdviceRun]]:
    return {cluster: [run for run in runs if run.cluster == cluster] for cluster in clusters}


def figures_of(clusters: Sequence[Cluster], runs: Sequence[AdviceRun]) -> Measured:
    """What `verdict` takes."""
    found = by_cluster(clusters, runs)
    return {cluster: {run.repetition: run.figures for run in of} for cluster, of in found.items()}


def figure_table(clusters: Sequence[Cluster], runs: Sequence[AdviceRun]) -> Table:
    """Of each figure and cluster the median over the repetitions, the lowest and the highest."""
    table = Table("", "prefill + decode", "median", "lowest", "highest", box=None)
    for column in table.columns[2:]:
        column.justify = "right"
    kept = Figure("kept", "kept the targets, %", lambda run: float(run["goodput"]["share"]) * 100, is_gain=True)
    for figure in (*FIGURES, kept):
        title = figure.title
        for cluster, of in by_cluster(clusters, runs).items():
            found = spread(figure.of(run.figures) for run in of)
            if found is not None:
                name = f"{cluster} (colocated)" if cluster.is_colocated else str(cluster)
                table.add_row(title, name, *map(_shown, (found.median, found.low, found.high)))
                title = ""
    return table


def kept_share(run: AdviceRun) -> float:
    """Of all requests."""
    return float(run.figures["goodput"]["share"])


def _shown(value: float) -> str:
    return f"{value:,.{2 if value < 10 else 1}f}"


def notes(clusters: Sequence[Cluster], runs: Sequence[AdviceRun], slo: Slo) -> Iterator[str]:
    """What a reader of the verdict must know."""
    shares = [
        share.median
        for of in by_cluster(clusters, runs).values()
        if (share := spread(kept_share(run) for run in of)) is not None
    ]
    targets = f"TTFT {slo.ttft_s or 0:g} s and TPOT {(slo.tpot_s or 0) * 1e3:g} ms"
    if shares and max(shares) < _FEW:
        yield f"no cluster keeps the targets ({targets}) of {_FEW:.0%} of the requests: the load, or they, ask too much"
    elif shares and min(shares) >= _NEARLY_ALL:
        yield (
            f"all clusters keep the targets ({targets}) of nearly all requests: a heavier load (--speed 2, a higher "
            "--rate) tells which of them bears more"
        )
    said: dict[str, list[str]] = {}
    for run in runs:
        for remark in run.remarks:
            said.setdefault(remark, []).append(f"{run.cluster}, repetition {run.repetition}")
    for remark, where in said.items():
        yield f"{'; '.join(where)}: {remark}"


def document(
    options: dict[str, Any], clusters: Sequence[Cluster], runs: Sequence[AdviceRun], found: Verdict | None, **more: Any
) -> dict[str, Any]:
    """Plain data; times in seconds. `options` are those of the command."""
    return {
        "format": FORMAT,
        "options": options,
        "clusters": [cluster._asdict() for cluster in clusters],
        **more,
        "verdict": None if found is None else found.as_json(),
        "runs": [run.as_json() for run in runs],
    }


def plot(path: Path, clusters: Sequence[Cluster], runs: Sequence[AdviceRun], said: str) -> None:
    """A panel for each figure: a bar is a cluster's median, a dot a repetition.

    Raises:
        ConfigError: matplotlib is not installed, or `path` cannot be written.
    """
    shown = [figure for figure in FIGURES if any(figure.of(run.figures) is not None for run in runs)]
    drawing = new_figure(height=4.2)
    for axes, figure in zip(drawing.subplots(1, len(shown)), shown, strict=True):
        _draw(axes, figure, clusters, runs)
    drawing.suptitle(said)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        drawing.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise ConfigError(f"the plot cannot be written: {error}", key="--plot") from error


def _draw(axes: Axes, figure: Figure, clusters: Sequence[Cluster], runs: Sequence[AdviceRun]) -> None:
    for number, of in enumerate(by_cluster(clusters, runs).values()):
        values = [value for run in of if (value := figure.of(run.figures)) is not None]
        found = spread(values)
        if found is not None:
            axes.bar(number, found.median, color=f"C{number}", alpha=0.6)
            axes.plot([number] * len(values), values, "o", color="#222", markersize=4)
    axes.set_xticks(range(len(clusters)), [str(cluster) for cluster in clusters])
    axes.set_title(figure.title)
    axes.set_xlabel("higher is better" if figure.is_gain else "lower is better")
    axes.set_ylim(bottom=0)
    axes.grid(axis="y", alpha=0.3)
