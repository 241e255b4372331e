"""The figures of a run, from its records. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from tandem.bench.load.records import Objective, RequestRecord

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class Distribution:
    """Of one latency; seconds."""

    num: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float


@dataclass(frozen=True)
class Goodput:
    """How many requests kept an SLO."""

    slo: Objective
    num_good: int
    share: float  # of all that were sent: a failed request has not kept it
    per_s: float


@dataclass(frozen=True)
class CacheUse:
    """What of the prompts the server had in its cache, by its own count; of the answers that tell it."""

    num_answers: int
    num_input_tokens: int
    num_cached_tokens: int
    num_repeated_tokens: int | None  # that had been sent or answered before: all that a cache could have

    @property
    def hit_ratio(self) -> float:
        """Of all prompt tokens."""
        return self.num_cached_tokens / self.num_input_tokens if self.num_input_tokens else 0.0

    @property
    def of_possible(self) -> float | None:
        """Of the tokens that had been there before; `None`: there were none, or it is not known."""
        return self.num_cached_tokens / self.num_repeated_tokens if self.num_repeated_tokens else None


@dataclass(frozen=True)
class ItlWindow:
    """The gaps that ended within one stretch of the run."""

    at_s: float  # its beginning
    num: int
    p50: float
    p99: float


@dataclass(frozen=True)
class TurnFigures:
    """The same turn of all conversations."""

    turn: int  # from 1
    num: int
    mean_input_tokens: float
    ttft_s: Distribution | None
    cache: CacheUse | None


@dataclass(frozen=True)
class Summary:
    """All figures of a run. Latencies and token counts are of the requests that succeeded, and of no other."""

    duration_s: float
    num_requests: int  # sent, whatever became of them
    num_succeeded: int
    num_failed: dict[str, int]  # by kind
    failure_examples: dict[str, str]  # the first message of each kind
    num_input_tokens: int
    num_output_tokens: int
    num_events: int
    num_short: int  # succeeded with fewer tokens than asked for
    num_wrong_input: int  # the server counted another prompt length than was sent
    token_sources: dict[str, int]
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    ttft_s: Distribution | None
    tpot_s: Distribution | None
    itl_s: Distribution | None
    e2e_s: Distribution | None
    second_gap_s: Distribution | None
    goodput: Goodput | None
    lateness_s: Distribution | None  # sent after its planned time: whether the generator kept up
    itl_windows: tuple[ItlWindow, ...]
    cache: CacheUse | None  # `None`: no answer tells
    turns: tuple[TurnFigures, ...] = ()  # of conversations


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear interpolation between closest ranks, numpy's default. `values` are sorted and not empty."""
    position = (len(values) - 1) * percent / 100
    lower = math.floor(position)
    upper = min(lower + 1, len(values) - 1)
    return values[lower] + (values[upper] - values[lower]) * (position - lower)


def distribution(values: Sequence[float]) -> Distribution | None:
    """`None` of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    p50, p90, p99 = (percentile(ordered, percent) for percent in PERCENTILES)
    return Distribution(len(ordered), math.fsum(ordered) / len(ordered), p50, p90, p99, ordered[-1])


def summarise(records: Sequence[RequestRecord], duration_s: float, slo: Objective | None = None) -> Summary:
    """The figures of `records`, the requests of a run that took `duration_s`."""
    good = [record for record in records if record.is_good]
    failed = [record for record in records if not record.is_good]
    num_input = sum(_num_input(record) for record in good)
    num_output = sum(record.num_output for record in good)
    rate = 1 / duration_s if duration_s > 0 else 0.0
    return Summary(
        duration_s=duration_s,
        num_requests=len(records),
        num_succeeded=len(good),
        num_failed=dict(sorted(Counter(record.failure or "" for record in failed).items())),
        failure_examples={record.failure or "": record.message for record in reversed(failed)},
        num_input_tokens=num_input,
        num_output_tokens=num_output,
        num_events=sum(len(record.event_s) for record in good),
        num_short=sum(record.num_output < record.num_output_asked for record in good),
        num_wrong_input=sum(_has_other_length(record) for record in good),
        token_sources=dict(sorted(Counter(record.token_source for record in good).items())),
        requests_per_s=len(good) * rate,
        output_tokens_per_s=num_output * rate,
        total_tokens_per_s=(num_input + num_output) * rate,
        ttft_s=distribution([record.ttft_s for record in good]),
        tpot_s=distribution([record.tpot_s for record in good if record.tpot_s is not None]),
        itl_s=distribution([gap for record in good for gap in record.itl_s]),
        e2e_s=distribution([record.e2e_s for record in good]),
        second_gap_s=distribution([record.second_gap_s for record in good if record.second_gap_s is not None]),
        goodput=None if slo is None else goodput(records, duration_s, slo),
        lateness_s=distribution([r.sent_s - r.planned_s for r in records if r.planned_s is not None]),
        itl_windows=itl_over_time(good, window_s(duration_s)),
        cache=cache_use(good),
        turns=by_turn(good),
    )


def goodput(records: Sequence[RequestRecord], duration_s: float, slo: Objective) -> Goodput:
    """How many of all requests kept `slo`."""
    num_good = sum(slo.is_met_by(record) for record in records)
    share = num_good / len(records) if records else 0.0
    return Goodput(slo, num_good, share, num_good / duration_s if duration_s > 0 else 0.0)


def by_turn(records: Sequence[RequestRecord]) -> tuple[TurnFigures, ...]:
    """Of the requests that succeeded and are turns of conversations, the first turns first."""
    turns: dict[int, list[RequestRecord]] = {}
    for record in records:
        if record.is_good and record.turn is not None:
            turns.setdefault(record.turn, []).append(record)
    return tuple(
        TurnFigures(
            turn=turn,
            num=len(of_turn),
            mean_input_tokens=math.fsum(map(_num_input, of_turn)) / len(of_turn),
            ttft_s=distribution([record.ttft_s for record in of_turn]),
            cache=cache_use(of_turn),
        )
        for turn, of_turn in sorted(turns.items())
    )


def cache_use(records: Sequence[RequestRecord]) -> CacheUse | None:
    """Of the requests that succeeded; `None` where no answer tells."""
    telling = [record for record in records if record.is_good and record.num_cached is not None]
    if not telling:
        return None
    repeated = [record.num_repeated for record in telling if record.num_repeated is not None]
    return CacheUse(
        num_answers=len(telling),
        num_input_tokens=sum(_num_input(record) for record in telling),
        num_cached_tokens=sum(record.num_cached or 0 for record in telling),
        num_repeated_tokens=sum(repeated) if len(repeated) == len(telling) else None,
    )


def _num_input(record: RequestRecord) -> int:
    """By the server's count, else as it was sent."""
    return (record.num_input_asked or 0) if record.num_input is None else record.num_input


def _has_other_length(record: RequestRecord) -> bool:
    return None not in (record.num_input, record.num_input_asked) and record.num_input != record.num_input_asked


def itl_over_time(records: Sequence[RequestRecord], window_s: float) -> tuple[ItlWindow, ...]:
    """Gaps by the window in which they ended; windows without any are left out."""
    windows: dict[int, list[float]] = {}
    for record in records:
        for gap, end_s in zip(record.itl_s, record.event_s[1:], strict=True):
            windows.setdefault(int(end_s / window_s), []).append(gap)
    found = []
    for number, gaps in sorted(windows.items()):
        gaps.sort()
        found.append(ItlWindow(number * window_s, len(gaps), percentile(gaps, 50), percentile(gaps, 99)))
    return tuple(found)


def window_s(duration_s: float) -> float:
    """Of ITL over time: a second, or more where the run is long: a plot has room for a few hundred points."""
    return max(1.0, math.ceil(duration_s / 300))
