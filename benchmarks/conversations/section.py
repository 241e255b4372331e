"""Conversations placed by prefixes and by load alone, as a section of `docs/benchmarks.md`."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from benchmarks.text import wrapped
from tandem.bench.other_load import QUIET_CORES

FORMAT = "tandem-conversations/3"
COMMAND = "`python -m benchmarks conversations`"

#: What is measured, by its name in the runs.
CONVERSATIONS, EQUAL_RATE, SINGLES = "conversations", "conversations at an equal rate", "single prompts"
ONE_PAIR = "one worker of each role"
#: So many times as many conversations are held at an equal rate: the first and the last ones find a cluster less busy.
TIMES_AS_MANY = 2

Figures = dict[str, Any]
_Row = tuple[str, str, Callable[[Figures], float]]


def section(content: dict[str, Any] | None) -> Iterator[str]:
    """Medians over the repetitions, with the lowest and the highest; `None`: nothing was measured."""
    yield ""
    yield "## Conversations"
    yield ""
    if content is None:
        yield from wrapped(
            f"No conversations were measured yet: {COMMAND} does, with prefixes found and without, and `make docs` "
            "then puts the figures here."
        )
        return
    yield from wrapped(_introduction(content))
    yield ""
    yield from _reservations(content["runs"])
    yield from _table(content["runs"], CONVERSATIONS, _rows(content["settings"]["plan"]["num_turns"]))
    yield ""
    yield from wrapped(_equal_rate(content))
    yield ""
    yield from _table(content["runs"], EQUAL_RATE, _rows(content["settings"]["plan"]["num_turns"]))
    yield ""
    yield from wrapped(_beside(content))
    yield ""
    yield from _table(content["runs"], SINGLES, _common_rows())


def _table(runs: Sequence[dict[str, Any]], part: str, rows: Iterable[_Row]) -> Iterator[str]:
    sides = [_figures(runs, part, placement) for placement in ("prefixes", "load")]
    yield "| | placed by prefixes | by load alone | ratio |"
    yield "|---|---|---|---|"
    for title, unit, value in rows:
        found = [[value(figures) for figures in side] for side in sides]
        ratios = [a / b for a, b in zip(*found, strict=True) if b]
        ratio = _spread(ratios, ".2f") if ratios else ""
        yield f"| {title} | {_spread(found[0], unit)} | {_spread(found[1], unit)} | {ratio} |"


def _figures(runs: Sequence[dict[str, Any]], part: str, placement: str) -> list[Figures]:
    return [run["figures"] for run in runs if (run["part"], run["placement"]) == (part, placement)]


def _introduction(content: dict[str, Any]) -> str:
    settings, machine = content["settings"], content["machine"]
    plan, num = settings["plan"], settings["cluster"]["num_of_each"]
    num_repetitions = max(run["repetition"] for run in content["runs"])
    return (
        f"Measured by {COMMAND} on {content['date'][:10]}: {num} prefill and {num} decode workers with a thread each "
        f"and the embedded model, as plain processes of one machine ({machine['cpu']}, {machine['num_cores']} cores; "
        f"sources {content['code']['digest']}). {plan['num']} conversations of {plan['num_turns']} turns over "
        f"{plan['api']}, {settings['concurrency']} at a time: each turn brings {plan['num_words']} words and gets "
        f"{plan['num_output']} tokens. Both ways have the same texts in a repetition, in turn, and begin with empty "
        f"caches. Medians of the repetitions ({num_repetitions}), with the lowest and the highest in brackets; a ratio "
        "is of each repetition. `possible` are the tokens of the turn before: its prompt and its answer."
    )


def _equal_rate(content: dict[str, Any]) -> str:
    settings = content["settings"]
    rates = sorted({run["rate"] for run in content["runs"] if run["part"] == EQUAL_RATE})
    return (
        "In a closed loop the faster way is given more to do. At an equal rate, "
        f"{settings['rate_share']:.0%} of the conversations a second that placement by load alone reached in the "
        f"closed loop of the same repetition ({_spread(rates, '.2f')} a second), "
        f"{TIMES_AS_MANY * settings['plan']['num']} conversations begin at the times of a Poisson process, and users "
        f"think for {settings['think_s']:g} s before each turn, in the mean:"
    )


def _beside(content: dict[str, Any]) -> str:
    """What one pair finds, and what the second table is of."""
    singles = content["settings"]["singles"]
    alone, together = (
        [_share(figures["cache"], "num_repeated_tokens") for figures in _figures(content["runs"], part, "prefixes")]
        for part in (ONE_PAIR, CONVERSATIONS)
    )
    ratios = [a / b for a, b in zip(together, alone, strict=True) if b]
    found = f" ({_spread(ratios, '.2f')} of it)" if ratios else ""
    return (
        f"One worker of each role, with the memory of all, caches {_spread(alone, '.1%')} of the possible on the same "
        f"conversations; placed by prefixes, {content['settings']['cluster']['num_of_each']} of each cache "
        f"{_spread(together, '.1%')}{found}. Looking for prefixes where there are none, "
        f"{singles['num']} single prompts of {singles['num_words']} words for {singles['num_output']} tokens each:"
    )


def _reservations(runs: Sequence[dict[str, Any]]) -> Iterator[str]:
    loud = [run["other_cores"] for run in runs if run["other_cores"] > QUIET_CORES]
    if loud:
        yield (
            f"- **Warning**: the machine had other load: others used up to {max(loud):.2f} cores just before "
            f"{len(loud)} of {len(runs)} runs."
        )
        yield ""


def _rows(num_turns: int) -> Iterator[_Row]:
    """Title, format, and how a figure is found."""
    yield "cached, of all prompt tokens", ".1%", lambda f: _share(f["cache"], "num_input_tokens")
    yield "cached, of the possible", ".1%", lambda f: _share(f["cache"], "num_repeated_tokens")
    for number in range(num_turns):
        yield f"TTFT p50 of turn {number + 1}, ms", ",.1f", _ttft_of_turn(number)
    yield from _common_rows()


def _common_rows() -> Iterator[_Row]:
    yield "TTFT mean, ms", ",.1f", lambda f: float(f["ttft_s"]["mean"] * 1e3)
    yield "TTFT p50, ms", ",.1f", lambda f: float(f["ttft_s"]["p50"] * 1e3)
    yield "TTFT p99, ms", ",.1f", lambda f: float(f["ttft_s"]["p99"] * 1e3)
    yield "TPOT p50, ms", ",.2f", lambda f: float(f["tpot_s"]["p50"] * 1e3)
    yield "output tokens/s", ",.0f", lambda f: float(f["output_tokens_per_s"])


def _share(cache: dict[str, Any], of: str) -> float:
    return float(cache["num_cached_tokens"] / cache[of]) if cache[of] else 0.0


def _ttft_of_turn(number: int) -> Callable[[Figures], float]:
    return lambda f: float(f["turns"][number]["ttft_s"]["p50"] * 1e3)


def _spread(values: Sequence[float], unit: str) -> str:
    median, low, high = (format(value, unit) for value in (statistics.median(values), min(values), max(values)))
    return median if len(values) == 1 else f"{median} ({low} to {high})"
