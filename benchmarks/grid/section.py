"""The section of the grid in docs/benchmarks.md: heat maps of ratios, and which goals are reached."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.grid.figures import AIMS, TANDEM, Aim, Content, geometric_mean, point_of, ratio
from benchmarks.grid.points import CLIENTS, Point, all_points
from benchmarks.peers.figures import Goal
from benchmarks.peers.origin import codes_of, hardware_words, listed
from benchmarks.text import wrapped
from tandem.bench.other_load import QUIET_CORES

_NEAR = 0.9  # of a goal, from which on it counts as nearly reached
_REACHED, _NEARLY, _MISSED, _WITHOUT_GOAL = "🟩", "🟨", "🟥", "⬜"


def section(contents: Sequence[Content]) -> Iterator[str]:
    """Nothing where no point was measured."""
    places = {point: number for number, point in enumerate(all_points())}
    found = sorted(contents, key=lambda content: places.get(point_of(content), len(places)))
    if not found:
        return
    yield ""
    yield "## A grid of loads"
    yield ""
    yield from wrapped(_introduction(found, len(places)))
    yield ""
    yield from (f"- **Warning**: {text}" for text in _warnings(found))
    tables: dict[tuple[str, str, str, bool], list[Content]] = {}
    for content in found:
        tables.setdefault(_table_of(content), []).append(content)
    for (_, model, dtype, is_open), points in tables.items():
        yield ""
        how = "arrivals by chance, at 0.9 of the rate that vLLM reached" if is_open else "as many clients as said"
        yield f"### {model}, {dtype}: {how}"
        yield ""
        yield f"On {hardware_words(points[0]['settings']['machine'])}."
        for aim in AIMS:
            yield from _heat_map(aim, points)
        yield from _goals(points)


def _table_of(content: Content) -> tuple[str, str, str, bool]:
    """Points of one kind of machine, model and type."""
    point, machine = point_of(content), content["settings"]["machine"]
    kind = f"{machine['cpu']}, {machine['num_cores']} cores, {machine.get('instructions', '')}"
    return kind, point.model, point.dtype, point.is_open


def _introduction(found: Sequence[Content], num_points: int) -> str:
    settings = found[0]["settings"]
    runs = [run for content in found for run in content["runs"]]
    num_found = len({point_of(content) for content in found})  # some on several kinds of machine
    dates = sorted(run["date"][:10] for run in runs)
    when = dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
    peer = f", vLLM with {listed(settings['peer_versions'])}" if "peer_versions" in settings else ""
    return (
        f"{num_found} of {num_points} points, measured by `make bench-grid` on {when}; "
        f"Tandem at {', '.join(codes_of(TANDEM, runs))}{peer}. "
        "Rows are tokens of a prompt, columns clients; in brackets tokens of an output. Each cell is Tandem's figure "
        "over the other server's, of one run each, with the same prompts: at least a thousand gaps between tokens. "
        f"{_REACHED} its goal is reached, {_NEARLY} missed by less than a tenth, {_MISSED} missed, {_WITHOUT_GOAL} it "
        "has none. Tandem colocated has as many workers as the split, of which each computes its prompts itself."
    )


def _warnings(found: Sequence[Content]) -> Iterator[str]:
    runs = [run for content in found for run in content["runs"]]
    if len({(run["code"] or {}).get("digest") for run in runs if run["code"] is not None}) > 1:
        yield "not all figures of Tandem are of the same code."
    loud = [run["other_cores"] for run in runs if run["other_cores"] > QUIET_CORES]
    if loud:
        yield f"others used up to {max(loud):.2f} cores just before {len(loud)} of {len(runs)} runs."
    if failed := sum(sum(run["figures"]["num_failed"].values()) for run in runs):
        yield f"{failed} requests failed and are in no figure."


def _heat_map(aim: Aim, contents: Sequence[Content]) -> Iterator[str]:
    cells = {
        (point.num_input, point.num_clients): _cell(point, value, aim.goal(point))
        for content in contents
        for point, value in ((point_of(content), ratio(content, aim)),)
        if value is not None
    }
    if not cells:
        return
    clients = [num for num in CLIENTS if any(column == num for _, column in cells)]
    yield ""
    yield f"| {aim.title} | {' | '.join(map(str, clients))} |"
    yield f"|---|{'---|' * len(clients)}"
    for num_input in sorted({row for row, _ in cells}):
        yield f"| {num_input} | {' | '.join(cells.get((num_input, num), '') for num in clients)} |"


def _cell(point: Point, value: float, goal: Goal | None) -> str:
    return f"{_colour(value, goal)} {value:.2f} ({point.num_output})"


def _colour(value: float, goal: Goal | None) -> str:
    if goal is None:
        return _WITHOUT_GOAL
    if goal.is_reached_by(value):
        return _REACHED
    near = Goal(goal.bound * _NEAR if goal.is_lower else goal.bound / _NEAR, goal.is_lower)
    return _NEARLY if near.is_reached_by(value) else _MISSED


def _goals(contents: Sequence[Content]) -> Iterator[str]:
    rows = [row for aim in AIMS if (row := _goal_row(aim, contents))]
    if rows:
        yield ""
        yield "| | goals reached | geometric mean | goal | farthest from its goal |"
        yield "|---|---|---|---|---|"
        yield from rows


def _goal_row(aim: Aim, contents: Sequence[Content]) -> str:
    """Empty where there is no ratio."""
    ratios = [(point_of(content), value) for content in contents if (value := ratio(content, aim)) is not None]
    if not ratios:
        return ""
    judged = [(point, value, goal) for point, value in ratios if (goal := aim.goal(point)) is not None]
    mean = geometric_mean([value for _, value in ratios])
    mean_goal = ""
    if aim.mean_goal is not None and judged:
        mean_goal = f"{aim.mean_goal}: {'reached' if aim.mean_goal.is_reached_by(mean) else '**missed**'}"
    num_reached = sum(goal.is_reached_by(value) for _, value, goal in judged)
    missed = [each for each in judged if not each[2].is_reached_by(each[1])]
    worst = ""
    if missed:
        point, value, goal = min(missed, key=lambda each: _nearness(each[1], each[2]))
        worst = f"{value:.2f} ({goal}) at {point.num_input}/{point.num_output}, {point.num_clients} clients"
    reached = f"{num_reached} of {len(judged)}" if judged else ""
    return f"| {aim.title} | {reached} | {mean:.2f} | {mean_goal} | {worst} |"


def _nearness(value: float, goal: Goal) -> float:
    """1 where it is just reached; less, the farther it is."""
    return value / goal.bound if goal.is_lower else goal.bound / value
