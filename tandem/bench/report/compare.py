"""Two measurements side by side: the ratios of one's figures to the other's."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from tandem.bench.report import results
from tandem.bench.report.tables import LATENCIES
from tandem.core.errors import ConfigError

_STATISTICS = ("mean", "p50", "p90", "p99")
#: Options without which two loads are not the same.
_LOAD_OPTIONS = (
    "input_len", "output_len", "num_requests", "limit", "concurrency", "rate", "trace", "cut", "conversations", "turns",
    "think_time", "api", "scale_lengths", "scale_time", "ignore_eos", "slo_ttft", "slo_tpot", "share",
)  # fmt: skip


def compare_files(first: Sequence[Path], second: Sequence[Path]) -> tuple[Table, list[str]]:
    """A table of figures and ratios (first over second; the medians of several files), and what to know of it.

    Raises:
        ConfigError: a file is none of ours, or they are of different kinds.
    """
    sides = [[results.read(path) for path in paths] for paths in (first, second)]
    kinds = {content["kind"] for side in sides for content in side}
    if len(kinds) != 1:
        raise ConfigError(f"these are of different kinds: {', '.join(sorted(kinds))}")
    names = [results.title(side[0], paths[0]) for side, paths in zip(sides, (first, second), strict=True)]
    table = Table("", *names, "ratio", box=None)
    for column in table.columns[1:]:
        column.justify = "right"
    for name, a, b in figures(*sides):
        table.add_row(name, _shown(a), _shown(b), f"{a / b:.3f}" if a is not None and b else "")
    return table, list(_notes(*sides))


def figures(
    first: Sequence[dict[str, Any]], second: Sequence[dict[str, Any]]
) -> list[tuple[str, float | None, float | None]]:
    """Name and both sides' medians of each figure; latencies in milliseconds, `None`: a side has none."""
    flat = [[_figures_of(content) for content in side] for side in (first, second)]
    names = list(dict.fromkeys(name for side in flat for content in side for name in content))
    return [(name, _median(flat[0], name), _median(flat[1], name)) for name in names]


def _figures_of(content: dict[str, Any]) -> dict[str, float]:
    if content["kind"] == "goodput":
        return {"goodput, requests/s": content["search"]["goodput_per_s"] or 0.0}
    found = content["runs"][0]["figures"]
    values = {"output tokens/s": found["output_tokens_per_s"], "requests/s": found["requests_per_s"]}
    if found["goodput"] is not None:
        values["goodput, requests/s"] = found["goodput"]["per_s"]
    if (cache := found.get("cache")) and cache["num_input_tokens"]:
        values["cached, of prompt tokens"] = cache["num_cached_tokens"] / cache["num_input_tokens"]
    for turn in found.get("turns", ()):
        if turn["ttft_s"] is not None:
            values[f"TTFT p50 of turn {turn['turn']}, ms"] = turn["ttft_s"]["p50"] * 1e3
    for title, attribute in LATENCIES:
        for statistic in _STATISTICS:
            if found[attribute] is not None:
                values[f"{title} {statistic}, ms"] = found[attribute][statistic] * 1e3
    return values


def _median(side: Sequence[dict[str, float]], name: str) -> float | None:
    values = [content[name] for content in side if name in content]
    return statistics.median(values) if values else None


def _shown(value: float | None) -> str:
    return "" if value is None else f"{value:,.3f}" if value < 100 else f"{value:,.1f}"


def _notes(first: Sequence[dict[str, Any]], second: Sequence[dict[str, Any]]) -> Iterator[str]:
    a, b = first[0], second[0]
    simulated = [one["server"]["model"] for one in (a, b) if results.is_simulated(one)]
    if len(simulated) == 1:
        yield f"{simulated[0]} is simulated: look yourself whether its load is that of the other one"
    else:
        names = sorted((a["options"].keys() | b["options"].keys()) - {"label"}) if simulated else _LOAD_OPTIONS
        for name in names:
            if a["options"].get(name) != b["options"].get(name):
                yield f"the loads differ in {name}: {a['options'].get(name)} and {b['options'].get(name)}"
    if not simulated and a["machine"] != b["machine"]:
        yield "the machines differ"
    for content in (*first, *second):
        runs = content["runs"]
        if content["was_interrupted"]:
            yield f"the measurement of {content['date']} is partial"
        num_failed = sum(sum(run["figures"]["num_failed"].values()) for run in runs)
        if num_failed and content["kind"] == "run":
            yield f"{num_failed} requests failed in the measurement of {content['date']}"
    if len(first) == len(second) and a["kind"] == "run":
        yield from _same_outputs(first, second)


def _same_outputs(first: Sequence[dict[str, Any]], second: Sequence[dict[str, Any]]) -> Iterator[str]:
    """How many texts are equal, of the files whose prompts were the same."""
    num_same = num = 0
    for a, b in zip(first, second, strict=True):
        if all(
            a["options"].get(key) == b["options"].get(key) for key in ("seed", "vocab", "tokenizer", *_LOAD_OPTIONS)
        ):
            for mine, other in zip(a["runs"][0]["digests"], b["runs"][0]["digests"], strict=False):
                num += 1
                num_same += mine == other and mine != ""
    if num:
        yield f"{num_same} of {num} greedy outputs are the same text"
