"""How long steps take, between those that were measured: a profile in a CSV file.

Its columns are `rows`, `prompt_tokens`, `context` and `ms`. A line is a step: of `rows` sequences that generate, with
`context` tokens each; or of `prompt_tokens` of one prompt, behind `context` tokens of it that are computed already.
Either kind has a line for each of its sizes with each of its contexts.
"""

from __future__ import annotations

import csv
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from tandem.core.errors import ConfigError
from tandem.core.step_times import Terms
from tandem.core.windows import NO_WINDOWS, Windows

_COLUMNS = ("rows", "prompt_tokens", "context", "ms")


@dataclass(frozen=True, slots=True)
class Grid:
    """Seconds by size and context: between the measured ones on straight lines, and beyond them on those of the last
    two. `seconds_of[i][j]` is of `sizes[i]` and `contexts[j]`, both ascending."""

    sizes: tuple[float, ...]
    contexts: tuple[float, ...]
    seconds_of: tuple[tuple[float, ...], ...]

    def seconds(self, size: float, context: float) -> float:
        i, of_size = _place(self.sizes, size)
        j, of_context = _place(self.contexts, context)
        low, high = (_between(self.seconds_of[at], j, of_context) for at in (i, min(i + 1, len(self.sizes) - 1)))
        return max(0.0, low + (high - low) * of_size)


def _place(marks: Sequence[float], value: float) -> tuple[int, float]:
    """The mark where a straight line begins, and how much of the way to the next one has been gone."""
    if len(marks) == 1:
        return 0, 0.0
    at = min(max(bisect_right(marks, value) - 1, 0), len(marks) - 2)
    return at, (value - marks[at]) / (marks[at + 1] - marks[at])


def _between(seconds: Sequence[float], at: int, share: float) -> float:
    return seconds[at] + (seconds[min(at + 1, len(seconds) - 1)] - seconds[at]) * share


@dataclass(frozen=True, slots=True)
class Table:
    """What generates and what prompts take; a step that has both reads the weights once, which is about what the
    smallest step of those that generate takes.

    `windows`: a profile has been measured behind whole contexts, so whatever its model sees of them is in it.
    """

    rows: Grid
    prompts: Grid
    windows: Windows = NO_WINDOWS

    def seconds(self, terms: Terms) -> float:
        num_new = terms.num_tokens - terms.num_rows
        if not num_new:
            return self._of_rows(terms.num_rows, terms.num_read) if terms.num_rows else 0.0
        # Of the sums over the whole step, as if its prompts were one: `start` tokens of it are computed already.
        start = 0.0
        if num_new > 1:
            among_new = num_new * (num_new - 1) / 2
            start = max(0.0, (terms.num_pairs - terms.num_read - among_new) / (num_new - 1))
        of_prompts = self.prompts.seconds(num_new, start)
        if not terms.num_rows:
            return of_prompts
        num_read = max(0.0, terms.num_read - start - num_new)
        smallest = self.rows.seconds_of[0][0]
        return self._of_rows(terms.num_rows, num_read) + max(0.0, of_prompts - smallest)

    def _of_rows(self, num_rows: int, num_read: float) -> float:
        return self.rows.seconds(num_rows, num_read / num_rows)


def read_table(path: Path) -> Table:
    """Raises `ConfigError`, which says what is missing where."""
    try:
        with path.open(newline="") as file:
            lines = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"cannot read {path}: {why}; name a profile of steps with table", key="table") from error
    rows: dict[tuple[float, float], float] = {}
    prompts: dict[tuple[float, float], float] = {}
    for number, line in enumerate(lines, start=2):
        try:
            num_rows, num_new, context, ms = (float(line[name]) for name in _COLUMNS)
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"{path}, line {number}: needs numbers in {', '.join(_COLUMNS)}", key="table") from error
        if (num_rows > 0) == (num_new > 0) or min(num_rows, num_new, context, ms) < 0:
            raise ConfigError(f"{path}, line {number}: either rows or prompt_tokens is above 0", key="table")
        (rows if num_rows else prompts)[num_rows or num_new, context] = ms * 1e-3
    return Table(_grid(path, "rows", rows), _grid(path, "prompt_tokens", prompts))


def _grid(path: Path, name: str, measured: dict[tuple[float, float], float]) -> Grid:
    if not measured:
        raise ConfigError(f"{path} has no line with {name}", key="table")
    sizes, contexts = (tuple(sorted({each[axis] for each in measured})) for axis in (0, 1))
    for size, context in product(sizes, contexts):
        if (size, context) not in measured:
            raise ConfigError(f"{path} has no line with {name} {size:g} and context {context:g}", key="table")
    return Grid(sizes, contexts, tuple(tuple(measured[size, context] for context in contexts) for size in sizes))
