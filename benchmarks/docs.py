"""Generate `docs/benchmarks.md` from the measurements in `docs/figures/`: `peers.json`, `peers_bfloat16.json`,
`peers_quantized.json`, `conversations.json`, `parts.json`, `placement.json`, `autoscale.json`, `autoscale_live.json`,
`scale.json`, `paper.json`, `links.json`, `kernels.json`, `kernels_avx512.json`, `kernels_avx2.json`, `accuracy.json`,
`host.json`, `speculation.json`, `simulated.json`, `predict.json`, `gpu_check.json`, all of the folders `grid` and
`goodput`, and plots of some; and of `law.json` a part of `docs/performance.md` and its plot, of `studies.json`
`docs/studies.md` and its plots.

    python -m benchmarks.docs                           write it
    python -m benchmarks.docs --check                   fail when the committed one is stale

What was not measured has no place in the page, but for servers side by side, goodput on mixes and conversations:
that they were not is said.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.accuracy.section import COMMAND as ACCURACY_COMMAND
from benchmarks.accuracy.section import FORMAT as ACCURACY_FORMAT
from benchmarks.accuracy.section import section as accuracy_section
from benchmarks.autoscale.live_section import COMMAND as AUTOSCALE_LIVE_COMMAND
from benchmarks.autoscale.live_section import FORMAT as AUTOSCALE_LIVE_FORMAT
from benchmarks.autoscale.live_section import PLOT as AUTOSCALE_LIVE_PLOT
from benchmarks.autoscale.live_section import plot as autoscale_live_plot
from benchmarks.autoscale.live_section import section as autoscale_live_section
from benchmarks.autoscale.section import COMMAND as AUTOSCALE_COMMAND
from benchmarks.autoscale.section import FORMAT as AUTOSCALE_FORMAT
from benchmarks.autoscale.section import PLOT as AUTOSCALE_PLOT
from benchmarks.autoscale.section import plot as autoscale_plot
from benchmarks.autoscale.section import section as autoscale_section
from benchmarks.conversations.section import COMMAND as CONVERSATIONS_COMMAND
from benchmarks.conversations.section import FORMAT as CONVERSATIONS_FORMAT
from benchmarks.conversations.section import section as conversations_section
from benchmarks.goodput.section import section as goodput_section
from benchmarks.gpu.section import COMMAND as GPU_COMMAND
from benchmarks.gpu.section import FORMAT as GPU_FORMAT
from benchmarks.gpu.section import section as gpu_section
from benchmarks.grid.section import section as grid_section
from benchmarks.host.section import FORMAT as HOST_FORMAT
from benchmarks.host.section import section as host_section
from benchmarks.kernels import command as kernels_command
from benchmarks.law.section import COMMAND as LAW_COMMAND
from benchmarks.law.section import FORMAT as LAW_FORMAT
from benchmarks.law.section import plot as law_plot
from benchmarks.law.section import section as law_section
from benchmarks.link.section import FORMAT as LINKS_FORMAT
from benchmarks.link.section import section as links_section
from benchmarks.paper.section import COMMAND as PAPER_COMMAND
from benchmarks.paper.section import FORMAT as PAPER_FORMAT
from benchmarks.paper.section import section as paper_section
from benchmarks.parts import figures as parts
from benchmarks.peers import figures as figures
from benchmarks.peers.figures import Goal, Run
from benchmarks.peers.goodput_figures import GoodputRatio, rate_words, ratio_words
from benchmarks.peers.origin import (
    PEERS,
    TITLES,
    code_words,
    codes_of,
    hardware_words,
    hours,
    listed,
    reservations,
    together,
)
from benchmarks.peers.turns import read
from benchmarks.placement.section import FORMAT as PLACEMENT_FORMAT
from benchmarks.placement.section import section as placement_section
from benchmarks.predict.curves import plot as predict_plot
from benchmarks.predict.section import COMMAND as PREDICT_COMMAND
from benchmarks.predict.section import FORMAT as PREDICT_FORMAT
from benchmarks.predict.section import PLOT as PREDICT_PLOT
from benchmarks.predict.section import section as predict_section
from benchmarks.scale.section import COMMAND as SCALE_COMMAND
from benchmarks.scale.section import FORMAT as SCALE_FORMAT
from benchmarks.scale.section import section as scale_section
from benchmarks.simulated.section import COMMAND as SIMULATED_COMMAND
from benchmarks.simulated.section import FORMAT as SIMULATED_FORMAT
from benchmarks.simulated.section import section as simulated_section
from benchmarks.speculation.section import COMMAND as SPECULATION_COMMAND
from benchmarks.speculation.section import FORMAT as SPECULATION_FORMAT
from benchmarks.speculation.section import section as speculation_section
from benchmarks.studies.page import COMMAND as STUDIES_COMMAND
from benchmarks.studies.page import FORMAT as STUDIES_FORMAT
from benchmarks.studies.page import page as studies_page
from benchmarks.studies.page import plots as studies_plots
from benchmarks.text import wrapped
from tandem.bench.other_load import QUIET_CORES
from tandem.bench.rate_search import RateSearch
from tandem.bench.repetitions import Spread, spread
from tandem.bench.report.json_file import read_format
from tandem.core.errors import ConfigError

ROOT = Path(__file__).resolve().parent.parent
SOURCE = Path("docs/figures/peers.json")
SHORT_SOURCE = Path("docs/figures/peers_bfloat16.json")
QUANTIZED_SOURCE = Path("docs/figures/peers_quantized.json")
CONVERSATIONS_SOURCE = Path("docs/figures/conversations.json")
GRID_SOURCES, GOODPUT_SOURCES = Path("docs/figures/grid"), Path("docs/figures/goodput")
TARGET = Path("docs/benchmarks.md")
LAW_SOURCE = Path("docs/figures/law.json")
LAW_TARGET, LAW_PLOT = Path("docs/performance.md"), Path("docs/figures/law.svg")
STUDIES_SOURCE, STUDIES_TARGET = Path("docs/figures/studies.json"), Path("docs/studies.md")
_LAW_BEGIN = "<!-- What follows is generated by `make docs` from docs/figures/law.json. -->"
_LAW_END = "<!-- Until here. -->"

BASELINE = "peer-colocated"
_SHOWN = (*figures.COMPARED, figures.SECOND_GAP, figures.GENERATOR)


def page(content: dict[str, Any] | None, **found: Any) -> str:
    """The page in Markdown: servers side by side (`content`, `of_short` in 16 bits, and `of_quantized` in fewer), the
    grid and goodput on mixes (`of_grid` and `of_goodput`, a file each), conversations, then what there is of the
    others, each by its name in `SECTIONS`."""
    of_short, of_quantized = found.pop("of_short", None), found.pop("of_quantized", None)
    of_grid = found.pop("of_grid", ())
    of_goodput = found.pop("of_goodput", ())
    of_conversations = found.pop("of_conversations", None)
    if unknown := found.keys() - {section.name for section in SECTIONS}:
        raise TypeError(f"the page has no section {', '.join(sorted(unknown))}")
    first = (SOURCE, SHORT_SOURCE, QUANTIZED_SOURCE, CONVERSATIONS_SOURCE, *(section.source for section in SECTIONS))
    sources = f"{', '.join(map(str, first))}, {GRID_SOURCES} and {GOODPUT_SOURCES}"
    lines = ["# Benchmarks", "", f"<!-- Generated by `make docs` from {sources}. -->", ""]
    if content is None or not (content["runs"] or content["goodput"]):
        lines.append("No servers were compared yet: `make bench` does, and `make docs` then writes this page.")
    else:
        lines += _side_by_side(content)
    if of_short is not None:
        lines += _short_section(of_short)
    if of_quantized is not None:
        lines += _quantized_section(of_quantized)
    lines += grid_section(of_grid)
    lines += goodput_section(of_goodput)
    lines += conversations_section(of_conversations)
    for section in SECTIONS:
        if (measured := found.get(section.name)) is not None:
            lines += section.lines(measured)
    return "\n".join(lines) + "\n"


def _side_by_side(content: dict[str, Any]) -> list[str]:
    lines = list(_introduction(content))
    lines += reservations((*content["runs"], *content["goodput"]))
    for name, load, runs in _by_load(content):
        lines += _load_section(name, load, runs)
    if content["goodput"]:
        lines += _goodput_section(content)
    if content["answers"]:
        lines += _answers_section(content["answers"])
    return lines


def _short_section(content: dict[str, Any]) -> Iterator[str]:
    """Servers side by side with a checkpoint of 16 bits: what a user of such a one gets by default."""
    settings = content["settings"]
    yield ""
    yield f"## The same in {settings['dtype']}"
    yield ""
    dates = sorted(run["date"][:10] for run in content["runs"])
    codes = ", ".join(codes_of("tandem", content["runs"]))
    yield f"Measured by `python -m benchmarks.peers --dtype {settings['dtype']}` on {dates[-1]}, on"
    yield f"{hardware_words(settings['machine'])}; Tandem at {codes}."
    yield "The checkpoint has the shape from above, in this type. Tandem is told nothing of types, vLLM its `--dtype`."
    yield from reservations(content["runs"])
    for name, load, runs in _by_load(content):
        yield from _load_section(name, load, runs, heading="###", goals=figures.SHORT_GOALS)


def _quantized_section(content: dict[str, Any]) -> Iterator[str]:
    """What `model.quantize` gives, beside the same checkpoint as it is."""
    settings = content["settings"]
    dates = sorted(run["date"][:10] for run in content["runs"])
    yield ""
    yield "## With fewer bits a weight"
    yield ""
    yield f"`model.quantize: int8` and `int4` beside the same {settings['dtype']} checkpoint as it is (random weights:"
    yield f"{listed(settings['model'])}), measured by"
    yield "`python -m benchmarks.peers --servers tandem tandem-int8 tandem-int4 --dtype bfloat16"
    yield f"--loads {' '.join(sorted(settings['loads']))} --json {QUANTIZED_SOURCE}`"
    yield f"on {dates[-1]}, on {hardware_words(settings['machine'])}; Tandem at"
    yield f"{', '.join(codes_of('tandem', content['runs']))}."
    yield from reservations(content["runs"])
    for name, load, runs in _by_load(content):
        yield from _load_section(
            name, load, runs, heading="###", goals=figures.QUANTIZED_GOALS, bases=("tandem",), compares_texts=False
        )


def _by_load(content: dict[str, Any]) -> Iterator[tuple[str, dict[str, int], list[Run]]]:
    """Each load that was measured: its name, its settings and its runs."""
    loads = content["settings"]["loads"]
    for name in sorted(loads):
        if runs := [run for run in content["runs"] if run["load"] == name]:
            yield name, loads[name], runs


def _introduction(content: dict[str, Any]) -> Iterator[str]:
    settings = content["settings"]
    machine, model = settings["machine"], settings["model"]
    dates = sorted(item["date"][:10] for item in (*content["runs"], *content["goodput"]))
    when = dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
    yield "Tandem and vLLM on one machine, one at a time, in turn, with the same prompts; measured by `make bench`"
    yield "([benchmarking.md](benchmarking.md) has the definitions)."
    yield ""
    yield "| | |"
    yield "|---|---|"
    yield f"| date | {when} |"
    yield f"| machine | {hardware_words(machine)} |"
    for contestant, title in TITLES.items():
        if contestant not in PEERS and (codes := codes_of(contestant, (*content["runs"], *content["goodput"]))):
            yield f"| {title} at | {', '.join(codes)} |"
    yield f"| Tandem with | {listed(settings['versions'])} |"
    if "peer_versions" in settings:
        yield f"| vLLM with | {listed(settings['peer_versions'])} |"
    yield f"| model | random weights, {settings['dtype']}: {listed(model)} |"
    yield ""
    yield "Figures are medians over the repetitions, with the lowest and the highest in brackets. A ratio is taken of"
    yield "each repetition, in which both servers had the same prompts, and then its median; runs that lie more than"
    yield f"{hours()} apart have no ratio."


def _load_section(
    name: str,
    load: dict[str, int],
    runs: Sequence[Run],
    *,
    heading: str = "##",
    goals: Mapping[tuple[str, str], tuple[Goal | None, ...]] = figures.RATIO_GOALS,
    bases: Collection[str] = PEERS,
    compares_texts: bool = True,
) -> Iterator[str]:
    """A table of figures, and one of ratios to each of `bases`."""
    by_server = {contestant: figures.runs_of(runs, contestant, name) for contestant in TITLES}
    by_server = {contestant: found for contestant, found in by_server.items() if found}
    clients = f"{load['concurrency']} client{'s' if load['concurrency'] > 1 else ''}"
    yield ""
    yield f"{heading} Load {name}: prompts of {load['num_input']} tokens, {load['num_output']} generated, {clients}"
    yield ""
    yield f"{load['num_requests']} requests a repetition."
    yield ""
    yield f"| | {' | '.join(TITLES[contestant] for contestant in by_server)} |"
    yield f"|---|{'---|' * len(by_server)}"
    yield _row("repetitions", [str(len(found)) for found in by_server.values()])
    for figure in _SHOWN:
        spreads = [spread(figure.of(run) for run in found.values()) for found in by_server.values()]
        yield _row(figure.title, [_shown(spread) for spread in spreads])
    for base in (contestant for contestant in by_server if contestant in bases):
        others = [contestant for contestant in by_server if contestant not in {*PEERS, *bases}]
        yield from _ratio_table(name, by_server, base, others, goals if base in (BASELINE, "tandem") else {})
    yield from _notes(name, by_server, compares_texts=compares_texts)


def _ratio_table(
    load: str,
    by_server: dict[str, dict[int, Run]],
    base: str,
    ours: Sequence[str],
    all_goals: Mapping[tuple[str, str], tuple[Goal | None, ...]],
) -> Iterator[str]:
    """Each of `ours` over `base`, beside the goals where there are any."""
    if not ours:
        return
    yield ""
    yield _row(f"ratio to {TITLES[base]}", [cell for contestant in ours for cell in (TITLES[contestant], "goal")])
    yield f"|---|{'---|---|' * len(ours)}"
    near = {contestant: together(by_server[contestant], by_server[base]) for contestant in ours}
    for number, figure in enumerate(figures.COMPARED):
        cells = []
        for contestant in ours:
            ratio = figures.ratios(near[contestant], by_server[base], figure)
            goals = all_goals.get((contestant, load), ())
            cells += [_shown(ratio, digits=2), figures.judged(ratio, goals[number] if number < len(goals) else None)]
        yield _row(figure.title.removesuffix(", ms"), cells)
    for contestant in ours:
        num_apart = len(by_server[contestant].keys() & by_server[base].keys()) - len(near[contestant])
        if num_apart:
            yield ""
            yield f"- {TITLES[contestant]}: repetitions without a ratio, as more than {hours()} apart: {num_apart}"


def _notes(load: str, by_server: dict[str, dict[int, Run]], *, compares_texts: bool) -> Iterator[str]:
    lines: list[str] = []
    for contestant, found in by_server.items():
        title, key = TITLES[contestant], (contestant, load)
        shares = spread(figures.handed_off(run) for run in found.values())
        if shares is not None:
            goal = _with_goal(shares, figures.HANDED_OFF_GOALS.get(key))
            lines.append(f"- {title}: share of prompt tokens handed off {_shown(shares, digits=2)}{goal}")
        gaps = spread(figures.gap_over_tpot(run) for run in found.values())
        if gaps is not None and contestant not in PEERS:
            goal = _with_goal(gaps, figures.GAP_GOALS.get(key))
            lines.append(f"- {title}: p99 gap of tokens 1 to 2 over mean TPOT {_shown(gaps, digits=2)}{goal}")
        if num_failed := figures.num_failed(found.values()):
            lines.append(f"- {title}: {num_failed} requests failed and are in no figure")
    if compares_texts and "tandem" in by_server:
        for contestant, found in by_server.items():
            num_same, num = figures.same_outputs(by_server["tandem"], found)
            if contestant != "tandem" and num:
                lines.append(f"- greedy outputs of Tandem and {TITLES[contestant]}: {num_same} of {num} the same text")
    if lines:
        yield ""
        yield from lines


def _goodput_section(content: dict[str, Any]) -> Iterator[str]:
    load = content["settings"]["goodput"]
    found = {search["contestant"]: search for search in content["goodput"]}
    base = found.get(BASELINE)
    yield ""
    yield "## Goodput"
    yield ""
    yield f"The highest Poisson rate at which {load['share']:.0%} of all requests have a TTFT of at most"
    yield f"{load['slo_ttft_s']:g} s and a TPOT of at most {load['slo_tpot_s'] * 1e3:g} ms: the first"
    yield f"{load['num_requests']} requests of `{load['trace']}`, lengths times {load['scale_lengths']:g}. One search"
    yield "of each server, so nothing is known of the spread; ≥ where no rate was found that is too high. In brackets"
    yield "is between which bounds the ratio lies, by the highest rates that were kept and the lowest that were not."
    yield ""
    yield f"| | requests/s | ratio to {TITLES[BASELINE]} | goal |"
    yield "|---|---|---|---|"
    for contestant, title in TITLES.items():
        if contestant not in found:
            continue
        search = found[contestant]
        goal = figures.GOODPUT_GOAL if contestant == "tandem" else None
        words = ("", "")
        if base is not None and contestant != BASELINE:
            words = ratio_words(GoodputRatio.of(search, base, RateSearch.precision), goal)
        yield _row(title, [rate_words(search, RateSearch.precision), *words])


def _answers_section(answers: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Whether all servers compute the same model: a greedy choice between two nearly equal logits may differ."""
    found = {item["contestant"]: item["answers"] for item in answers}
    pairs = [(a, b) for a, b in (("tandem", other) for other in TITLES if other != "tandem") if {a, b} <= found.keys()]
    if not pairs:
        return
    yield ""
    yield "## The same tokens"
    yield ""
    yield "The same prompts, one at a time, answered greedily. Servers add in different orders, so where two tokens are"
    yield "nearly as likely they may choose differently, and go on from there on their own."
    yield ""
    yield "| | same answers | first tokens that differ |"
    yield "|---|---|---|"
    for a, b in pairs:
        first = [figures.first_difference(*texts) for texts in zip(found[a], found[b], strict=True)]
        differing = sorted(number for number in first if number is not None)
        same = f"{len(first) - len(differing)} of {len(first)}"
        yield _row(f"{TITLES[a]} and {TITLES[b]}", [same, ", ".join(map(str, differing))])


def _parts_section(measured: dict[str, Any]) -> Iterator[str]:
    """Single parts of the system beside their goals, and what each figure was made of."""
    yield ""
    yield "## Parts of the system"
    yield ""
    yield "Measured by `python -m benchmarks parts`; [benchmarking.md](benchmarking.md) says how."
    yield ""
    yield from _circumstances(measured)
    yield f"| handoffs | by {measured['transport']}, of the model {measured['model']} |"
    if measured["other_cores"] > QUIET_CORES:
        yield ""
        yield f"- **Warning**: others used {measured['other_cores']:.2f} cores just before."
    yield ""
    yield "| part | measured | goal | how |"
    yield "|---|---|---|---|"
    for figure in measured["figures"]:
        value = f"{parts.shown(figure['value'], figure['unit'])} {figure['against']}".strip()
        yield _row(figure["title"], [value, _part_goal(figure), figure["how"]])
    yield ""
    yield "| what a figure is made of | p50 | p99 | n |"
    yield "|---|---|---|---|"
    for figure in measured["figures"]:
        for name, found in figure["samples"].items():
            unit = parts.sample_unit(name)
            cells = [parts.shown(found["p50"], unit), parts.shown(found["p99"], unit), f"{found['num']:,}"]
            yield _row(f"{figure['name']}: {name}", cells)
        for name, fact in figure["facts"].items():
            yield _row(f"{figure['name']}: {name}", [parts.shown_fact(fact), "", ""])


def _circumstances(measured: dict[str, Any]) -> Iterator[str]:
    """A table that may go on."""
    yield "| | |"
    yield "|---|---|"
    yield f"| date | {measured['date'][:10]} |"
    yield f"| machine | {hardware_words(measured['machine'])} |"
    yield f"| Tandem at | {code_words(measured['code'])} |"
    yield f"| with | {listed(measured['versions'])} |"


def _kernels_section(measured: dict[str, Any], title: str = "Kernels") -> Iterator[str]:
    """The engine's kernels against what the machine's threads can do."""
    reports = measured["reports"]
    yield ""
    yield f"## {title}"
    yield ""
    yield "Measured by `python -m benchmarks kernels`, which takes each kernel's limit from what libraries reach on as"
    yield "many threads; [benchmarking.md](benchmarking.md) says how. Shares are the limit over the median run."
    yield ""
    yield from _circumstances(measured)
    yield f"| model | {measured['model']['name']}, float32 |"
    yield ""
    if (most := max(report["other_load"] for report in reports)) > QUIET_CORES:
        yield f"- **Warning**: others used {most:.2f} cores meanwhile."
        yield ""
    threads = [kernels_command.threads_title(report["num_threads"]) for report in reports]
    yield _row("limit", threads)
    yield f"|---|{'---|' * len(reports)}"
    yield _row("products", [f"{report['product_flop_per_s'] / 1e9:,.0f} GFLOP/s" for report in reports])
    yield _row("reads", [f"{report['read_bytes_per_s'] / 1e9:,.1f} GB/s" for report in reports])
    yield ""
    yield _row("kernel", [*threads, "goal"])
    yield f"|---|{'---|' * len(reports)}---|"
    for found in zip(*(report["kernels"] for report in reports), strict=True):
        cells = [f"{kernel['timing']['median_s'] * 1e3:,.2f} ms, {kernel['share']:.0%}" for kernel in found]
        goal = found[0]["goal"]
        reached = goal is not None and all(kernel["share"] >= goal for kernel in found)
        judged = "" if goal is None else f"≥ {goal:.0%}: {'reached' if reached else '**missed**'}"
        yield _row(found[0]["name"], [*cells, judged])
    if prompts := measured.get(kernels_command.PROMPT_ATTENTION):
        yield from _prompts_section(prompts)
    yield ""
    yield "### Products by type of weights"
    yield ""
    if weights := measured.get(kernels_command.WEIGHT_TYPES):
        yield from _weights_section(weights)
    else:
        yield "Not measured."


def _prompts_section(measured: dict[str, Any]) -> Iterator[str]:
    """Attention of prompts, which may be measured at another time than the other kernels."""
    runs, sizes, goal = measured["runs"], measured["sizes"], measured["goal"]
    yield ""
    yield f"Attention of a prompt's last {sizes['chunk']} tokens, {sizes['num_heads']} query heads to"
    yield f"{sizes['num_kv_heads']} of K and V, in float32: of the fused multiply-adds that the same threads do in"
    yield "registers, measured in turn with it; beside it torch's `scaled_dot_product_attention`. On"
    yield f"{measured['date'][:10]}, {hardware_words(measured['machine'])}, at {code_words(measured['code'])}."
    yield ""
    if (most := max(run["other_load"] for run in runs)) > QUIET_CORES:
        yield f"- **Warning**: others used up to {most:.2f} cores meanwhile. One thread's times are those it computed."
        yield ""
    yield _row("threads", ["head", "context", "limit, GFLOP/s", "Tandem", "torch", "goal"])
    yield f"|---|{'---|' * 6}"
    for run in runs:
        limit = run["limit_flop_per_s"]
        rates = [f"{run[name] / 1e9:,.0f}, {run[name] / limit:.0%}" for name in ("flop_per_s", "torch_flop_per_s")]
        judged = f"≥ {goal:.0%}: {'reached' if run['share'] >= goal else '**missed**'}"
        cells = [str(run["head_dim"]), f"{run['context']:,}", f"{limit / 1e9:,.0f}", *rates, judged]
        yield _row(str(run["num_threads"]), cells)


def _weights_section(measured: dict[str, Any]) -> Iterator[str]:
    """Products with each type of weights, which may be measured at another time than the other kernels."""
    runs, sizes = measured["runs"], measured["sizes"]
    counts = sizes["rows"]
    goals = {run["num_rows"]: run["goal"] for run in runs if run["goal"] is not None}
    told = ", ".join(f"{num:,} row{'s' if num > 1 else ''} {goal:.0%}" for num, goal in goals.items())
    yield from wrapped(
        f"One linear layer, {sizes['in_features']:,} → {sizes['out_features']:,}, its weights from memory: few rows "
        "are a decode step's, many a prompt's. A share is of the limit that binds: of the bytes that the same threads "
        "sum up from memory, or of the fused multiply-adds that they do in registers, both measured in turn with the "
        "products. `bfloat16` and `float16` become float32 for it, as `int8` and `int4` do, so their multiply-adds "
        "are those of float32; *by two* and *in tiles* are the CPU's own products of bfloat16, where it has them, both "
        "beside multiply-adds by two. Goals for weights "
        f"of 16 bits that are widened: {told or 'none'}. On {measured['date'][:10]}, "
        f"{hardware_words(measured['machine'])}, at {code_words(measured['code'])}."
    )
    yield ""
    if (most := max((run["other_load"] for run in runs), default=0.0)) > QUIET_CORES:
        yield f"- **Warning**: others used up to {most:.2f} cores meanwhile. One thread's times are those it computed."
        yield ""
    yield _row("threads", ["weights", "multiply-adds", "reads", *(f"{n:,} row{'s' if n > 1 else ''}" for n in counts)])
    yield f"|---|{'---|' * (3 + len(counts))}"
    for (num_threads, weights), of_type in itertools.groupby(runs, lambda run: (run["num_threads"], run["weights"])):
        found = list(of_type)
        adds = f"{found[0]['limit_flop_per_s'] / 1e9:,.0f} GFLOP/s"
        reads = f"{found[0]['limit_bytes_per_s'] / 1e9:,.1f} GB/s"
        yield _row(str(num_threads), [weights, adds, reads, *(_weights_cell(run) for run in found)])


def _weights_cell(run: dict[str, Any]) -> str:
    missed = run["goal"] is not None and run["share"] < run["goal"]
    return f"{run['seconds'] * 1e3:,.2f} ms, {run['share']:.0%} of {run['bound']}{', **missed**' if missed else ''}"


def _part_goal(figure: dict[str, Any]) -> str:
    goal = Goal(**figure["goal"])
    return f"{parts.shown_goal(goal, figure['unit'])}: {'reached' if figure['is_reached'] else '**missed**'}"


def _row(title: str, cells: Sequence[str]) -> str:
    return f"| {title} | {' | '.join(cells)} |"


def _shown(spread: Spread | None, digits: int = 1) -> str:
    if spread is None:
        return ""
    text = f"{spread.median:,.{digits}f}"
    return text if spread.num == 1 else f"{text} ({spread.low:,.{digits}f} to {spread.high:,.{digits}f})"


def _with_goal(spread: Spread, goal: Goal | None) -> str:
    return f"; goal {figures.judged(spread, goal)}" if goal is not None else ""


@dataclass(frozen=True)
class Section:
    """One that the page has where it was measured."""

    name: str  # the keyword of `page`
    source: Path
    format: str
    command: str  # that writes the source
    lines: Callable[[dict[str, Any]], Iterable[str]]


def _section(
    name: str, file_format: str, command: str, lines: Callable[[dict[str, Any]], Iterable[str]], source: str = ""
) -> Section:
    return Section(f"of_{name}", Path(f"docs/figures/{source or name}.json"), file_format, command, lines)


SECTIONS = (
    _section("parts", parts.FORMAT, "`python -m benchmarks parts`", _parts_section),
    _section("placement", PLACEMENT_FORMAT, "`python -m benchmarks placement`", placement_section),
    _section("autoscale", AUTOSCALE_FORMAT, AUTOSCALE_COMMAND, autoscale_section),
    _section("autoscale_live", AUTOSCALE_LIVE_FORMAT, AUTOSCALE_LIVE_COMMAND, autoscale_live_section),
    _section("scale", SCALE_FORMAT, SCALE_COMMAND, scale_section),
    _section("paper", PAPER_FORMAT, PAPER_COMMAND, paper_section),
    _section("links", LINKS_FORMAT, "`python -m benchmarks link`", links_section),
    _section("kernels", kernels_command.FORMAT, "`python -m benchmarks kernels`", _kernels_section),
    _section(
        "kernels_avx512",
        kernels_command.FORMAT,
        "`python -m benchmarks kernels`",
        partial(_kernels_section, title="Kernels where a CPU has AVX-512 and multiplies no bfloat16"),
    ),
    _section(
        "kernels_avx2",
        kernels_command.FORMAT,
        "`python -m benchmarks kernels`",
        partial(_kernels_section, title="Kernels where a CPU has no AVX-512"),
    ),
    _section("accuracy", ACCURACY_FORMAT, ACCURACY_COMMAND, accuracy_section),
    _section("host", HOST_FORMAT, "`python -m benchmarks host`", host_section),
    _section("speculation", SPECULATION_FORMAT, SPECULATION_COMMAND, speculation_section),
    _section("simulated", SIMULATED_FORMAT, SIMULATED_COMMAND, simulated_section),
    _section("predict", PREDICT_FORMAT, PREDICT_COMMAND, predict_section),
    _section("gpu", GPU_FORMAT, GPU_COMMAND, gpu_section, source="gpu_check"),
)

#: Of sections, by their names.
PLOTS: Mapping[str, tuple[Path, Callable[[dict[str, Any]], str]]] = {
    "of_autoscale": (AUTOSCALE_PLOT, autoscale_plot),
    "of_autoscale_live": (AUTOSCALE_LIVE_PLOT, autoscale_live_plot),
    "of_predict": (PREDICT_PLOT, predict_plot),
}


def with_law(text: str, of_law: dict[str, Any]) -> str:
    """The page with its part of the law as measured."""
    before, rest = text.split(_LAW_BEGIN)
    _, after = rest.split(_LAW_END)
    return "\n".join([f"{before}{_LAW_BEGIN}", "", *law_section(of_law), "", f"{_LAW_END}{after}"])


def _read(source: Path, file_format: str, whose: str) -> dict[str, Any] | None:
    """`None` where nothing was measured. Raises as `read_format` does."""
    return read_format(source, file_format, whose) if source.exists() else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare only, exit 1 when stale")
    check = parser.parse_args().check
    source, short, quantized = ROOT / SOURCE, ROOT / SHORT_SOURCE, ROOT / QUANTIZED_SOURCE
    try:
        measured = {one.name: _read(ROOT / one.source, one.format, one.command) for one in SECTIONS}
        text = page(
            read(source) if source.exists() else None,
            of_short=read(short) if short.exists() else None,
            of_quantized=read(quantized) if quantized.exists() else None,
            of_grid=[read(path) for path in sorted((ROOT / GRID_SOURCES).glob("*.json"))],
            of_goodput=[read(path) for path in sorted((ROOT / GOODPUT_SOURCES).glob("*.json"))],
            of_conversations=_read(ROOT / CONVERSATIONS_SOURCE, CONVERSATIONS_FORMAT, CONVERSATIONS_COMMAND),
            **measured,
        )
        of_law = read_format(ROOT / LAW_SOURCE, LAW_FORMAT, LAW_COMMAND)
        of_studies = read_format(ROOT / STUDIES_SOURCE, STUDIES_FORMAT, STUDIES_COMMAND)
    except ConfigError as error:
        sys.exit(error.message)
    pages = {
        TARGET: text,
        LAW_TARGET: with_law((ROOT / LAW_TARGET).read_text(), of_law),
        LAW_PLOT: law_plot(of_law),
        STUDIES_TARGET: studies_page(of_studies, STUDIES_SOURCE),
        **studies_plots(of_studies),
        **{path: plot(found) for name, (path, plot) in PLOTS.items() if (found := measured[name]) is not None},
    }
    for target, wanted in pages.items():
        path = ROOT / target
        if not check:
            path.parent.mkdir(exist_ok=True)
            path.write_text(wanted)
        elif not path.is_file() or path.read_text() != wanted:
            sys.exit(f"stale: {target}; run: make docs")
        print(f"{target} is fresh" if check else f"wrote {target}")


if __name__ == "__main__":
    main()
