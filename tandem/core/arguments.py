"""What the command line's parsers share: the nearest name for a slip, and numbers that are checked as they are read."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Callable
from typing import Any, NamedTuple

#: Beyond this no number of anything makes sense, and floats do not hold all whole numbers.
_MOST = 10**15


class Parser(argparse.ArgumentParser):
    """Ends an unknown option or choice with the usage of its own command, and says what may have been meant.

    An option is not known by its first letters alone: the next option may begin with them too.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings, allow_abbrev=False)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        options, extra = super().parse_known_args(args, namespace)
        if extra:
            self.error(f"unknown: {' '.join(extra)}{self._meant_by(extra)}")
        return options, extra

    def _meant_by(self, extra: list[str]) -> str:
        given = (text.partition("=")[0] for text in extra if text.startswith("--"))
        nearest = [near for text in given for near in difflib.get_close_matches(text, self._option_string_actions, n=1)]
        return f"; did you mean {' '.join(nearest)}?" if nearest else ""

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            nearest = difflib.get_close_matches(str(value), map(str, action.choices or ()), n=1)
            if nearest:
                error.message += f"; did you mean {nearest[0]}?"
            raise


def number(text: str, type: Callable[[str], float], is_right: Callable[[float], bool], what: str) -> Any:
    """`text` as a `type` that `is_right`. Raises argparse's error, which says that it is not `what`."""
    try:
        value = type(text)
    except ValueError:
        value = float("nan")
    if not is_right(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
    return value


def whole(least: int, most: int | None = None) -> Callable[[str], Any]:
    """Reads whole numbers from `least` to `most`, or from `least` on."""
    range_words = f"of at least {least}" if most is None else f"from {least} to {most}"

    def read(text: str) -> Any:
        value = number(
            text, int, lambda value: least <= value and (most is None or value <= most), f"a whole number {range_words}"
        )
        if value > _MOST:
            raise argparse.ArgumentTypeError(f"{text!r} is more than there can be of anything; give at most {_MOST}")
        return value

    return read


class PoolSizes(NamedTuple):
    """Workers that a pool may have; with two equal numbers its size is fixed, else it follows its load."""

    least: int
    most: int

    def __str__(self) -> str:
        return str(self.least) if self.least == self.most else f"{self.least}:{self.most}"


def pool_sizes(least: int, most: int) -> Callable[[str], PoolSizes]:
    """Reads `2`, a fixed size, and `1:4`, the fewest and the most; each of them from `least` to `most`, but a range
    begins with 1 worker or more."""
    size = whole(least, most)

    def read(text: str) -> PoolSizes:
        first, colon, second = text.partition(":")
        found = PoolSizes(size(first), size(second if colon else first))
        if found.least > found.most:
            raise argparse.ArgumentTypeError(f"{text!r} is no range of sizes: the first is more than the second")
        if found.least == 0 < found.most:
            raise argparse.ArgumentTypeError(f"{text!r} is no range: a pool that follows its load has 1 worker or more")
        return found

    return read


port = whole(1, 65535)
"""A TCP port that can be named."""
