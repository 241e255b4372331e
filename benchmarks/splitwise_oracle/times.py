"""How long a step takes on Splitwise's machines: its profile, and what its simulator reads from it. Pure."""

from __future__ import annotations

import csv
import statistics
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tandem.core.errors import ConfigError
from tandem.core.step_times import Terms
from tandem.core.windows import NO_WINDOWS, Windows

#: What a step takes that has prompts and sequences that generate, beside one of as many tokens of prompts alone.
MIXED = 1.1
#: The size of a machine in the reference runs, in cards.
TENSOR_PARALLEL = 8


@dataclass(frozen=True)
class Curve:
    """A line through measured points, which goes on straight beyond the first and the last.

    Attributes:
        sizes: ascending, two at least, in tokens.
        seconds: at each of them.
    """

    sizes: Sequence[float]
    seconds: Sequence[float]

    def at(self, size: float) -> float:
        i = min(max(bisect_left(self.sizes, size), 1), len(self.sizes) - 1)
        x, to_x = self.sizes[i - 1], self.sizes[i]
        y, to_y = self.seconds[i - 1], self.seconds[i]
        return y + (to_y - y) * (size - x) / (to_x - x)


@dataclass(frozen=True)
class Splitwise:
    """The time model of Splitwise's simulator (Patel et al., ISCA 2024), a `StepTimes`.

    One number describes a step: the tokens of its prompts plus the sequences that generate. So a step of sequences
    alone is read off a curve over sizes of *prompts*, nearly flat, and context counts for nothing. A prompt is no row
    of `Terms` here: the first token comes with its step.
    """

    prompt: Curve
    token: Curve
    windows: Windows = NO_WINDOWS

    def seconds(self, terms: Terms) -> float:
        if terms.num_rows == terms.num_tokens:
            return self.token.at(terms.num_tokens)
        alone = self.prompt.at(terms.num_tokens)
        return alone * MIXED if terms.num_rows else alone


def read_profile(path: Path, model: str = "bloom-176b") -> dict[str, Splitwise]:
    """Of each kind of hardware its times: medians of all measurements with as many tokens in all (prompt times batch).

    Raises `ConfigError` where the file has no such columns, or no two sizes of the model.
    """
    try:
        with path.open(newline="") as file:
            rows = [
                (row["hardware"], int(row["prompt_size"]) * int(row["batch_size"]), row)
                for row in csv.DictReader(file)
                if row["model"] == model and int(row["tensor_parallel"]) == TENSOR_PARALLEL
            ]
            found: dict[str, dict[int, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
            for hardware, size, row in rows:
                found[hardware][size].append((float(row["prompt_time"]) / 1e3, float(row["token_time"]) / 1e3))
    except OSError as error:
        raise ConfigError(f"cannot read the profile {path}: {error.strerror}; name one with --profile") from error
    except (KeyError, ValueError, TypeError) as error:
        raise ConfigError(f"{path} is no profile of Splitwise's: {error!r}") from error
    if not found or min(map(len, found.values())) < 2:
        raise ConfigError(f"{path} has no two sizes of {model} on {TENSOR_PARALLEL} cards")
    return {hardware: _times(by_size) for hardware, by_size in found.items()}


def _times(by_size: dict[int, list[tuple[float, float]]]) -> Splitwise:
    sizes = sorted(by_size)
    prompt, token = (
        [statistics.median(measured[column] for measured in by_size[size]) for size in sizes] for column in (0, 1)
    )
    return Splitwise(Curve(sizes, prompt), Curve(sizes, token))
