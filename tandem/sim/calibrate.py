"""`tandem sim calibrate`: the sum of terms that comes nearest to the times of steps that a cluster has taken."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import yaml
from rich.console import Console
from rich.table import Table

from tandem.core.config_tree import build
from tandem.core.errors import ConfigError
from tandem.core.step_times import Fitted, Points, Terms
from tandem.core.time_model import FittedSpec, ModelSpec
from tandem.core.windows import NO_WINDOWS, Windows
from tandem.sim.cores import STEPS, Beside, Kind, Slowdowns
from tandem.worker.step_log import COLUMNS, MODEL, SUFFIX, model_keys

# Steps that took so many times as long as the others like them were held up by something else: a first use of memory,
# another process. They are not of the model.
_OUTLIER = 3.0
_ROUNDS = 6
# Of terms and slowdowns in turn: each is found from the other.
_SHARED_ROUNDS = 40
_FEWEST = 20
# Between these a step's time is a line: a processor reads weights once for some rows, and has sums to spare meanwhile.
_ROW_KNOTS = 1, 2, 4, 8, 16, 32, 64, 128
_PROMPT_KNOTS = 16, 64, 256, 1024, 4096
# Steps' worth of time alone, without which nothing is said of what others take from it.
_FEWEST_ALONE = 3.0
# Of a column of terms, what is no rounding.
_OF_NOTHING = 1e-6

_Numbers = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Step:
    """One that was taken; `worker` is its file's. `began_s`: by the clock of the host; `windows`: of its model."""

    worker: str
    terms: Terms
    seconds: float
    began_s: float = 0.0
    windows: Windows = NO_WINDOWS


@dataclass(frozen=True, slots=True)
class Fit:
    """What was found of some steps.

    Attributes:
        median_off, p90_off: of the steps' times, relative.
        total_off: of the sum of them all.
        num_left_out: steps that took several times what the model says.
        slowdowns: beside others, of workers that share a host's cores; `None`: each has its own.
    """

    times: Fitted
    num: int
    num_left_out: int
    median_off: float
    p90_off: float
    total_off: float
    slowdowns: Slowdowns | None = None


def read_steps(paths: Iterable[Path]) -> list[Step]:
    """Of step logs, or of directories of them. Raises `ConfigError`, which names the file that is none."""
    files: list[Path] = []
    for path in paths:
        files += sorted(path.glob(f"*{SUFFIX}")) if path.is_dir() else [path]
    files = list({file.resolve(): file for file in files}.values())
    if not files:
        raise ConfigError(
            f"no *{SUFFIX} there; let a cluster write them with metrics.step_log: DIRECTORY", key="metrics.step_log"
        )
    return [step for file in files for step in _read(file)]


def _read(file: Path) -> Iterable[Step]:
    worker = file.name.removesuffix(SUFFIX).removesuffix(".1")
    try:
        with file.open(newline="") as lines:
            first, windows = next(lines, ""), NO_WINDOWS
            if first.startswith(MODEL):
                windows = build(ModelSpec, json.loads(first.removeprefix(MODEL))).windows
                first = next(lines, "")
            if tuple(first.strip().split(",")) != COLUMNS:
                raise ConfigError(f"{file} is no step log; its first line must be {','.join(COLUMNS)}")
            for row in csv.reader(lines):
                tokens, decode_rows, read, pairs, seconds, began_s = row
                terms = Terms(int(tokens), int(decode_rows), float(read), float(pairs))
                yield Step(worker, terms, float(seconds), float(began_s), windows)
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{file} is no step log: {error}") from error


def fit(steps: Sequence[Step], *, outlier: float = _OUTLIER) -> Fit:
    """The terms with no one below 0 whose sums are nearest to the steps' times, relative to what they say. So they say
    what such steps take on average, also where a few take much longer.

    Args:
        outlier: steps that took so many times as long as the others like them are left out.

    Raises:
        ConfigError: there are too few steps, or one took no time.
    """
    if len(steps) < _FEWEST:
        raise ConfigError(f"{len(steps)} steps are too few to fit a model to; take {_FEWEST} or more, of several loads")
    # Tokens of prompts and generated ones each have their own: the latter may cost less, not less than nothing.
    num_rows = np.array([step.terms.num_rows for step in steps])
    num_of_prompts = np.array([step.terms.num_tokens for step in steps]) - num_rows
    row_knots, prompt_knots = _knots(num_rows, _ROW_KNOTS), _knots(num_of_prompts, _PROMPT_KNOTS)
    hinges = _hinges(num_rows, row_knots), _hinges(num_of_prompts, prompt_knots)
    only_prompts = (num_rows == 0).astype(float)
    # Of few sizes of prompts it is a sum of what their tokens cost.
    is_told = min(only_prompts.sum(), (1 - only_prompts).sum()) >= _FEWEST and _says_more(only_prompts, hinges[1])
    lines = np.column_stack((np.ones(len(steps)), only_prompts * is_told, *hinges))
    rest = np.array([(step.terms.num_read, step.terms.num_pairs) for step in steps])
    rest *= [_says_more(column, lines) for column in rest.T]
    matrix = np.column_stack((lines, rest))
    seconds = np.array([step.seconds for step in steps])
    if seconds.min() <= 0:
        worker = steps[int(seconds.argmin())].worker
        raise ConfigError(f"{worker} has a step of {seconds.min():g} s; leave that log out")
    taken = np.ones(len(steps), dtype=bool)
    said = seconds
    for _ in range(_ROUNDS):
        found = _not_negative(matrix[taken] / said[taken, None], seconds[taken] / said[taken])
        said = np.maximum(matrix @ found, 1e-12)
        ratio = seconds / said
        taken = ratio < outlier * np.median(ratio)
    base, read, pair = (float(found[index]) for index in (0, -2, -1))
    of_rows, of_prompts = np.split(found[2:-2], [len(row_knots)])
    times = Fitted(
        base, of_read_s=read, of_pair_s=pair, of_rows=_points(row_knots, of_rows),
        of_prompts=_points(prompt_knots, of_prompts), only_prompts_s=float(found[1]),
    )  # fmt: skip
    return _judged(times, steps, outlier)


def _knots(numbers: npt.NDArray[np.int_], knots: Sequence[int]) -> list[float]:
    """Those before and behind which there are steps enough to tell of a line of their own, and behind them where the
    last one ends: at the largest number. None where all are 0."""
    last, found = int(numbers.max()), [0.0]
    for knot in knots:
        num_before, num_behind = ((numbers > found[-1]) & (numbers <= knot)).sum(), (numbers > knot).sum()
        if min(num_before, num_behind) >= _FEWEST:
            found.append(float(knot))
    return [*found[1:], float(last)] if last else []


def _says_more(column: _Numbers, others: _Numbers) -> bool:
    """Whether it is no sum of the others: of steps of prompts alone, whose context was computed in them, what is read
    is only their tokens once more."""
    left = column - others @ np.linalg.lstsq(others, column, rcond=None)[0]
    return bool(np.linalg.norm(left) > _OF_NOTHING * np.linalg.norm(column))


def _hinges(numbers: npt.NDArray[np.int_], knots: Sequence[float]) -> _Numbers:
    """[num_steps, num_knots]: how much of each number lies between a knot and the one before it; the last one's line
    goes on."""
    if not knots:
        return np.empty((len(numbers), 0))
    before = np.array((0.0, *knots[:-1]))
    lengths = np.array((*np.diff((0.0, *knots[:-1])), np.inf))
    found: _Numbers = np.clip(numbers[:, None] - before, 0.0, lengths)
    return found


def _points(knots: Sequence[float], slopes: _Numbers) -> Points:
    ends_s = np.cumsum(slopes * np.diff((0.0, *knots)))
    return tuple((knot, float(end_s)) for knot, end_s in zip(knots, ends_s, strict=True))


def fit_shared(steps: Sequence[Step], num_cores: int) -> Fit:
    """As `fit`, of workers that share one host's cores; and how much longer a step takes beside others. Its terms are
    of a step that is alone. What is off is told of the steps' times alone. None is left out: that a step waits for a
    core is what is looked for.

    Args:
        num_cores: that so many steps are computed at a time. It is not found: loads that are measured show few of the
            numbers of steps which may be under way, and of those each number of cores says about the same.

    Raises:
        ConfigError: there are too few steps, hardly any of a kind while no other worker computed, or some of a worker
            that lie in each other.
    """
    spent_s, generates = seconds_by_state(steps), _generate(steps)
    if (lost := spent_s.sum(axis=(1, 2)) <= 0).any():
        worker = steps[int(lost.argmax())].worker
        raise ConfigError(f"steps of {worker} lie in each other, or take no time; name each log once")
    if len(steps) >= _FEWEST:
        _require_alone(spent_s, generates)
    slowdowns = Slowdowns(num_cores=num_cores)
    for _ in range(_SHARED_ROUNDS):
        own_s = _own_seconds(spent_s, generates, slowdowns)
        found = fit([replace(step, seconds=own) for step, own in zip(steps, own_s, strict=True)], outlier=math.inf)
        alone_s = np.array([found.times.seconds(step.terms) for step in steps])
        of_kind = [
            _slowdown(slowdowns, kind, spent_s[rows], alone_s[rows])
            for kind, rows in ((Kind.PROMPTS, ~generates), (Kind.DECODE, generates))
        ]
        slowdowns = replace(slowdowns, prompts=of_kind[0], decode=of_kind[1])
    return replace(found, slowdowns=slowdowns)


def _require_alone(spent_s: _Numbers, generates: npt.NDArray[np.bool_]) -> None:
    """Steps of each kind that there is must have been alone, now and then."""
    for rows, state, what in ((~generates, (1, 0), "computes prompts"), (generates, (0, 1), "generates")):
        of_kind = spent_s[rows]
        if len(of_kind) and not (of_kind[:, *state] / of_kind.sum(axis=(1, 2))).sum() >= _FEWEST_ALONE:
            raise ConfigError(
                f"hardly any step that {what} was taken while no other worker computed; add a load of one client"
            )


def _slowdown(slowdowns: Slowdowns, kind: Kind, spent_s: _Numbers, alone_s: _Numbers) -> Beside:
    """With which steps that take so long alone took what they did, relative to that, where turns are as said."""
    if not len(alone_s):
        return Beside()
    states = np.indices(spent_s.shape[1:]).reshape(2, -1)
    turns, share = np.array([slowdowns.turns(int(num)) for num in states.sum(axis=0)]).T
    others = np.maximum(states - np.array([[kind is Kind.PROMPTS], [kind is Kind.DECODE]]), 0)
    computed_s = spent_s.reshape(len(spent_s), -1) / turns
    seconds = computed_s.sum(axis=1)
    num_beside = computed_s @ (share * others).T / seconds[:, None]
    found = _not_negative(num_beside, seconds / alone_s - 1)
    return Beside(float(found[0]), float(found[1]))


def _generate(steps: Sequence[Step]) -> npt.NDArray[np.bool_]:
    """[num_steps]: which are of this kind."""
    return np.array([Kind.of(step.terms.num_rows) is Kind.DECODE for step in steps])


def own_seconds(steps: Sequence[Step], slowdowns: Slowdowns) -> _Numbers:
    """[num_steps]: that each would have taken alone."""
    return _own_seconds(seconds_by_state(steps), _generate(steps), slowdowns)


def _own_seconds(spent_s: _Numbers, generates: npt.NDArray[np.bool_], slowdowns: Slowdowns) -> _Numbers:
    found = np.zeros(len(spent_s))
    for num_prompts, num_decode in np.ndindex(*spent_s.shape[1:]):
        for kind, num, rows in ((Kind.PROMPTS, num_prompts, ~generates), (Kind.DECODE, num_decode, generates)):
            if num:
                found[rows] += spent_s[rows, num_prompts, num_decode] / slowdowns.of(kind, num_prompts, num_decode)
    return found


def seconds_by_state(steps: Sequence[Step]) -> _Numbers:
    """[num_steps, num_prompts + 1, num_decode + 1]: of each step the seconds in which so many steps of prompts, and so
    many that generate, were under way, itself among them; for as many of both as there are workers that took such."""
    began_s = np.array([step.began_s for step in steps])
    ended_s = began_s + np.array([step.seconds for step in steps])
    moments = np.concatenate((began_s, ended_s))
    order = np.argsort(moments, kind="stable")
    moments = moments[order]
    generates = _generate(steps)
    under_way = [
        np.cumsum(np.concatenate((is_kind, -is_kind.astype(int)))[order])[:-1] for is_kind in (~generates, generates)
    ]
    num_workers = [
        len({step.worker for step, is_of_kind in zip(steps, is_kind, strict=True) if is_of_kind})
        for is_kind in (~generates, generates)
    ]
    gaps_s = np.diff(moments)
    begin, end = np.searchsorted(moments, began_s), np.searchsorted(moments, ended_s)
    found = np.empty((len(steps), num_workers[0] + 1, num_workers[1] + 1))
    for num_prompts, num_decode in np.ndindex(*found.shape[1:]):
        is_so = (under_way[0] == num_prompts) & (under_way[1] == num_decode)
        before_s = np.concatenate(((0.0,), np.cumsum(gaps_s * is_so)))
        found[:, num_prompts, num_decode] = before_s[end] - before_s[begin]
    return found


def _not_negative(matrix: _Numbers, wanted: _Numbers) -> _Numbers:
    """The x of no value below 0 for which `matrix @ x` is nearest to `wanted` (Lawson and Hanson, "Solving Least
    Squares Problems", 1974, chapter 23)."""
    scale = np.maximum(np.abs(matrix).max(axis=0), 1e-300)
    scaled = matrix / scale
    gram, target = scaled.T @ scaled, scaled.T @ wanted
    num = gram.shape[0]
    x, free = np.zeros(num), np.zeros(num, dtype=bool)
    for _ in range(10 * num):
        slope = np.where(free, -np.inf, target - gram @ x)
        entering = int(slope.argmax())
        if slope[entering] <= 1e-9 * len(matrix):
            break
        free[entering] = True
        while True:
            best = np.zeros(num)
            best[free] = np.linalg.lstsq(gram[np.ix_(free, free)], target[free], rcond=None)[0]
            below = free & (best <= 0)
            if not below.any():
                break
            step = np.min(x[below] / np.maximum(x[below] - best[below], 1e-300))
            x = x + step * (best - x)
            free &= x > 1e-12
        x = best
    fitted: _Numbers = x / scale
    return fitted


def spec_of(times: Fitted) -> FittedSpec:
    """In the units of a scenario."""
    return FittedSpec(
        base_ms=times.base_s * 1e3, only_prompts_ms=times.only_prompts_s * 1e3, token_us=times.of_token_s * 1e6,
        row_us=times.of_row_s * 1e6, read_ns=times.of_read_s * 1e9, pair_ns=times.of_pair_s * 1e9,
        rows_ms=_in_ms(times.of_rows), prompts_ms=_in_ms(times.of_prompts),
    )  # fmt: skip


def run(paths: Sequence[Path], out: Path | None, num_cores: int = 0) -> int:
    """Print the fit of all steps and how near it comes to each worker's; write it to `out`. `num_cores`: as of
    `fit_shared`; 0: the workers share none."""
    steps = read_steps(paths)
    windows = _windows_of(steps)
    found = fit_shared(steps, num_cores) if num_cores else fit(steps)
    spec = spec_of(found.times)
    tree: dict[str, object] = {
        "times": "fitted",
        "fitted": tree_of(spec),
    }
    if windows.window:
        tree["model"] = model_keys(windows)
    if found.slowdowns is not None:
        tree["cores"] = cores_tree(found.slowdowns)
        tree["card"] = {"is_cpu": True}  # only workers on CPUs share cores
        own_s = own_seconds(steps, found.slowdowns)
        steps = [replace(step, seconds=float(seconds)) for step, seconds in zip(steps, own_s, strict=True)]
    table = Table("worker", "steps", "left out", "median off", "p90 off", "sum off", box=None)
    for name in sorted({step.worker for step in steps}):
        own = [step for step in steps if step.worker == name]
        table.add_row(name, *_shown(_judged(found.times, own, math.inf if num_cores else _OUTLIER)))
    table.add_row("all", *_shown(found))
    for column in table.columns[1:]:
        column.justify = "right"
    console = Console(soft_wrap=True, highlight=False)
    console.print(table)
    for points, what in ((found.times.of_rows, "generates"), (found.times.of_prompts, "computes prompts")):
        if not points:
            unknown = f"no step {what} in these logs: what that takes is not known, and counts as nothing"
            console.print(unknown, style="yellow")
    text = yaml.safe_dump(tree, sort_keys=False)
    console.print(f"\n{text.strip()}", markup=False)
    if out is not None:
        try:
            out.write_text(f"# By `tandem sim calibrate`, of {found.num:,} steps.\n{text}")
        except OSError as error:
            raise ConfigError(f"cannot write {out}: {error.strerror}", key="--out") from error
    return 0


def cores_tree(slowdowns: Slowdowns) -> dict[str, Any]:
    """`cores` of a scenario, of all that is found."""
    of_kind = {kind.value: getattr(slowdowns, kind.value) for kind in STEPS}
    found: dict[str, Any] = {
        name: {"prompts": float(f"{beside.prompts:.4g}"), "decode": float(f"{beside.decode:.4g}")}
        for name, beside in of_kind.items()
        if beside != Beside()
    }
    return found | ({"num_cores": slowdowns.num_cores} if slowdowns.num_cores else {})


def _windows_of(steps: Sequence[Step]) -> Windows:
    """Those of all. Raises `ConfigError` where they differ: a sum fits one model's steps."""
    by_windows = {step.windows: step.worker for step in steps}
    if len(by_windows) > 1:
        told = ", ".join(f"{worker} of {model_keys(windows)}" for windows, worker in by_windows.items())
        raise ConfigError(f"the logs are of several models ({told}); calibrate those of one at a time")
    return next(iter(by_windows), NO_WINDOWS)


def _in_ms(points: Points) -> Points:
    return tuple((number, seconds * 1e3) for number, seconds in points)


def tree_of(spec: FittedSpec) -> dict[str, Any]:
    """Its keys and values, but for those that say nothing: plain data of few digits."""
    found: dict[str, Any] = {}
    for name in FittedSpec.__dataclass_fields__:
        value = getattr(spec, name)
        if isinstance(value, float) and value:
            found[name] = float(f"{value:.6g}")
        elif isinstance(value, tuple) and value:
            found[name] = [[number, float(f"{ms:.6g}")] for number, ms in value]
    return {"base_ms": 0.0, **found}


def _judged(times: Fitted, steps: Sequence[Step], outlier: float = _OUTLIER) -> Fit:
    said = np.array([times.seconds(step.terms) for step in steps])
    seconds = np.array([step.seconds for step in steps])
    taken = seconds < outlier * said
    if not taken.any():
        taken = ~taken
    said, seconds = said[taken], seconds[taken]
    off = np.abs(said - seconds) / seconds
    return Fit(
        times, len(said), len(steps) - len(said), float(np.median(off)), float(np.percentile(off, 90)),
        float(said.sum() / seconds.sum() - 1),
    )  # fmt: skip


def _shown(found: Fit) -> tuple[str, ...]:
    return (
        f"{found.num:,}", f"{found.num_left_out:,}", f"{found.median_off:.1%}", f"{found.p90_off:.1%}",
        f"{found.total_off:+.1%}",
    )  # fmt: skip
