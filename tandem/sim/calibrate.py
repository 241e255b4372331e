"""`tandem sim calibrate`: the sum of terms that comes nearest to the times of steps that a cluster has taken."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import yaml
from rich.console import Console
from rich.table import Table

from tandem.core.config_tree import build
from tandem.core.errors import ConfigError
from tandem.core.step_times import Fitted, Terms
from tandem.core.time_model import FittedSpec, ModelSpec
from tandem.core.windows import NO_WINDOWS, Windows
from tandem.worker.step_log import COLUMNS, MODEL, SUFFIX, model_keys

# Steps that took so many times as long as the others like them were held up by something else: a first use of memory,
# another process. They are not of the model.
_OUTLIER = 3.0
_ROUNDS = 6
# Of terms and speeds in turn: each is found from the other.
_SHARED_ROUNDS = 40
_FEWEST = 20
# Steps' worth of time while so many workers compute, without which nothing is said of that number.
_FEWEST_AT_ONCE = 3.0

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
        speeds: while 1, 2, … workers compute, of a host's that share its cores; none: each has its own. As many as were
            seen at once; of more a scenario says that they share what is left.
    """

    times: Fitted
    num: int
    num_left_out: int
    median_off: float
    p90_off: float
    total_off: float
    speeds: tuple[float, ...] = ()


def read_steps(paths: Iterable[Path]) -> list[Step]:
    """Of step logs, or of directories of them. Raises `ConfigError`, which names the file that is none."""
    files: list[Path] = []
    for path in paths:
        files += sorted(path.glob(f"*{SUFFIX}")) if path.is_dir() else [path]
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
        ConfigError: there are too few steps.
    """
    if len(steps) < _FEWEST:
        raise ConfigError(f"{len(steps)} steps are too few to fit a model to; take {_FEWEST} or more, of several loads")
    # Tokens of prompts and generated ones each have their own: the latter may cost less, not less than nothing.
    matrix = np.array(
        [(1.0, t.num_tokens - t.num_rows, t.num_rows, t.num_read, t.num_pairs) for t in (s.terms for s in steps)]
    )
    seconds = np.array([step.seconds for step in steps])
    taken = np.ones(len(steps), dtype=bool)
    said = seconds
    for _ in range(_ROUNDS):
        found = _not_negative(matrix[taken] / said[taken, None], seconds[taken] / said[taken])
        said = np.maximum(matrix @ found, 1e-12)
        ratio = seconds / said
        taken = ratio < outlier * np.median(ratio)
    base, token, row, read, pair = (float(value) for value in found)
    return _judged(Fitted(base, token, row - token, read, pair), steps, outlier)


def fit_shared(steps: Sequence[Step]) -> Fit:
    """As `fit`, of workers that share one host's cores; and how fast a step is while so many of them compute. Its
    terms are of a step that is alone. What is off is told of the steps' times at these speeds. None is left out:
    that a step waits for a core is what is looked for.

    Raises:
        ConfigError: there are too few steps, or hardly any while no other worker computed.
    """
    shares = seconds_by_busy(steps)
    by_busy = shares / shares.sum(axis=1, keepdims=True)
    is_seen = by_busy.sum(axis=0) >= _FEWEST_AT_ONCE
    if len(steps) >= _FEWEST and not is_seen[0]:
        raise ConfigError("hardly any step was taken while no other worker computed; add a load of one client")
    seen = np.flatnonzero(is_seen)
    speeds = np.ones(shares.shape[1])
    for _ in range(_SHARED_ROUNDS):
        own_s = shares @ speeds
        found = fit([replace(step, seconds=own) for step, own in zip(steps, own_s, strict=True)], outlier=math.inf)
        said_s = np.array([found.times.seconds(step.terms) for step in steps])
        # Of the steps by how many computed meanwhile, what they say is in sum what they took, at these speeds.
        left_s = said_s - shares[:, ~is_seen] @ speeds[~is_seen]
        of_seen = by_busy[:, seen].T
        relative = np.linalg.lstsq(of_seen @ shares[:, seen], of_seen @ left_s, rcond=None)[0]
        speeds = _of_each(seen, _falling(relative / relative[0]), len(speeds))
    return replace(found, speeds=tuple(float(speed) for speed in speeds[: seen[-1] + 1]))


def _falling(speeds: _Numbers) -> _Numbers:
    """None is above the one before, or so low that a step would not end."""
    return np.maximum(np.minimum.accumulate(speeds), 0.01)


def _of_each(seen: npt.NDArray[np.intp], speeds: _Numbers, num: int) -> _Numbers:
    """[num]: of a number that no step tells of it is on the line between its neighbours; more share what is left."""
    numbers = np.arange(num)
    found: _Numbers = np.interp(numbers, seen, speeds) * np.minimum(1.0, (seen[-1] + 1) / (numbers + 1))
    return found


def seconds_by_busy(steps: Sequence[Step]) -> _Numbers:
    """[num_steps, num_workers]: of each step the seconds in which 1, 2, … workers were computing."""
    began_s = np.array([step.began_s for step in steps])
    ended_s = began_s + np.array([step.seconds for step in steps])
    moments = np.concatenate((began_s, ended_s))
    order = np.argsort(moments, kind="stable")
    moments = moments[order]
    num_busy = np.cumsum(np.repeat((1, -1), len(steps))[order])
    gaps_s = np.diff(moments)
    found = []
    for number in range(1, len({step.worker for step in steps}) + 1):
        before_s = np.concatenate(((0.0,), np.cumsum(gaps_s * (num_busy[:-1] == number))))
        found.append(before_s[np.searchsorted(moments, ended_s)] - before_s[np.searchsorted(moments, began_s)])
    return np.stack(found, axis=1)


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
        base_ms=times.base_s * 1e3, token_us=times.of_token_s * 1e6, row_us=times.of_row_s * 1e6,
        read_ns=times.of_read_s * 1e9, pair_ns=times.of_pair_s * 1e9,
    )  # fmt: skip


def run(paths: Sequence[Path], out: Path | None, *, shared_cores: bool = False) -> int:
    """Print the fit of all steps and how near it comes to each worker's; write it to `out`."""
    steps = read_steps(paths)
    windows = _windows_of(steps)
    found = fit_shared(steps) if shared_cores else fit(steps)
    spec = spec_of(found.times)
    tree: dict[str, object] = {
        "times": "fitted",
        "fitted": {name: float(f"{value:.6g}") for name, value in vars_of(spec).items()},
    }
    if windows.window:
        tree["model"] = model_keys(windows)
    if shared_cores:
        tree["cores"] = {"speeds": [float(f"{speed:.4g}") for speed in found.speeds]}
        tree["card"] = {"is_cpu": True}  # only workers on CPUs share cores
        shares = seconds_by_busy(steps)
        seen = np.arange(len(found.speeds))
        own_s = shares @ _of_each(seen, np.array(found.speeds), shares.shape[1])
        steps = [replace(step, seconds=float(seconds)) for step, seconds in zip(steps, own_s, strict=True)]
    table = Table("worker", "steps", "left out", "median off", "p90 off", "sum off", box=None)
    for name in sorted({step.worker for step in steps}):
        own = [step for step in steps if step.worker == name]
        table.add_row(name, *_shown(_judged(found.times, own, math.inf if shared_cores else _OUTLIER)))
    table.add_row("all", *_shown(found))
    for column in table.columns[1:]:
        column.justify = "right"
    console = Console(soft_wrap=True, highlight=False)
    console.print(table)
    text = yaml.safe_dump(tree, sort_keys=False)
    console.print(f"\n{text.strip()}", markup=False)
    if out is not None:
        try:
            out.write_text(f"# By `tandem sim calibrate`, of {found.num:,} steps.\n{text}")
        except OSError as error:
            raise ConfigError(f"cannot write {out}: {error.strerror}", key="--out") from error
    return 0


def _windows_of(steps: Sequence[Step]) -> Windows:
    """Those of all. Raises `ConfigError` where they differ: a sum fits one model's steps."""
    by_windows = {step.windows: step.worker for step in steps}
    if len(by_windows) > 1:
        told = ", ".join(f"{worker} of {model_keys(windows)}" for windows, worker in by_windows.items())
        raise ConfigError(f"the logs are of several models ({told}); calibrate those of one at a time")
    return next(iter(by_windows), NO_WINDOWS)


def vars_of(spec: FittedSpec) -> dict[str, float]:
    """Its keys and values."""
    return {name: getattr(spec, name) for name in FittedSpec.__dataclass_fields__}


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
