"""What repetitions on several clusters say: whether to split, and how sure that is. Pure.

Goodput decides: requests a second that keep their targets. Where it does not tell clusters apart, the other figures do.
A difference counts where it is at least `margin` and chance does not explain it: repetitions, which all clusters share,
say how much chance does (`tandem.bench.repetitions`). Between clusters that are the same, goodput sees a difference in
one of twenty measurements at most, and the other figures, all together, in one of twenty.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from tandem.advise.clusters import Cluster
from tandem.bench.repetitions import Difference, differences, half_width, residual

RunFigures = Mapping[str, Any]  # of a `Summary`, as plain data
#: Figures by cluster, the colocated one first, and by repetition.
Measured = Mapping[Cluster, Mapping[int, RunFigures]]

_CHANCE = 0.05
_MOST_REPETITIONS = 100  # that are proposed


@dataclass(frozen=True)
class Figure:
    """One figure of a run.

    Attributes:
        of: `None` where the run has none; latencies are in milliseconds.
        is_gain: more of it is better.
    """

    name: str
    title: str
    of: Callable[[RunFigures], float | None]
    is_gain: bool = False


def _latency(name: str, statistic: str) -> Callable[[RunFigures], float | None]:
    def of(figures: RunFigures) -> float | None:
        found = figures.get(name)
        return None if found is None else float(found[statistic]) * 1e3

    return of


GOODPUT = Figure("goodput", "goodput, requests/s", lambda run: float(run["goodput"]["per_s"]), is_gain=True)
FIGURES = (
    GOODPUT,
    Figure("throughput", "output tokens/s", lambda run: float(run["output_tokens_per_s"]), is_gain=True),
    Figure("ttft", "mean TTFT, ms", _latency("ttft_s", "mean")),
    Figure("tpot", "mean TPOT, ms", _latency("tpot_s", "mean")),
    Figure("itl", "p99 ITL, ms", _latency("itl_s", "p99")),
    Figure("gap", "p99 longest gap of a request, ms", _latency("longest_gap_s", "p99")),
)
_NUM_OTHERS = 4  # beside goodput, that a run has: it knows all gaps, or the longest of each request


class Outcome(StrEnum):
    """How a split's figure lies beside the colocated cluster's."""

    BETTER = "better"
    WORSE = "worse"
    SAME = "same"  # a difference of `margin` or more is ruled out
    UNCLEAR = "unclear"  # neither


@dataclass(frozen=True)
class Comparison:
    """One figure of a split over the colocated cluster's.

    Attributes:
        ratio: `None` where the colocated one's is 0.
        low, high: bounds of the ratio, all of one figure together with the confidence of `differences`; `None`: none.
        more: repetitions with which a difference of `margin` would show; `None`: they do, or far too many.
    """

    cluster: Cluster
    figure: str
    ratio: float | None
    low: float | None
    high: float | None
    outcome: Outcome
    more: int | None = None

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "cluster": str(self.cluster), "outcome": self.outcome.value}


class Answer(StrEnum):
    """To: should this load be split?"""

    SPLIT = "split"
    COLOCATED = "colocated"
    DEPENDS = "depends"  # better in one figure, worse in another
    SAME = "same"
    UNCLEAR = "unclear"


@dataclass(frozen=True)
class Verdict:
    """The answer, the cluster that suits, and why; `comparisons` of each split and figure."""

    answer: Answer
    cluster: Cluster
    words: tuple[str, ...]
    comparisons: tuple[Comparison, ...]

    def as_json(self) -> dict[str, Any]:
        return {
            "answer": self.answer.value,
            "cluster": str(self.cluster),
            "words": list(self.words),
            "comparisons": [comparison.as_json() for comparison in self.comparisons],
        }


def verdict(measured: Measured, margin: float, *, is_exact: bool = False) -> Verdict | None:
    """`None` where no repetition has run on all clusters, or there is only one of them. `is_exact`: a repetition gives
    the same again, so one tells all."""
    whole = set.intersection(*(set(of) for of in measured.values())) if len(measured) > 1 else set()
    if not whole:
        return None
    if is_exact:
        whole = set(list(whole)[:1])
    runs = {cluster: _in_order(of, whole) * (2 if is_exact else 1) for cluster, of in measured.items()}
    comparisons = [comparison for figure in FIGURES for comparison in _compared(figure, runs, margin)]
    return _Judgement(list(measured), comparisons, len(whole), margin).verdict()


def _in_order(runs: Mapping[int, RunFigures], numbers: set[int]) -> list[RunFigures]:
    return [runs[number] for number in sorted(numbers)]


def _compared(figure: Figure, runs: Mapping[Cluster, Sequence[RunFigures]], margin: float) -> list[Comparison]:
    """None where a run has no such figure."""
    rows = [[figure.of(run) for run in of_cluster] for of_cluster in runs.values()]
    values = [[value for value in row if value is not None] for row in rows]
    if any(len(row) < len(rows[0]) for row in values):
        return []
    # Ratios, as chance acts by shares; where a run has reached nothing, differences in shares of the largest mean.
    are_ratios = all(value > 0 for row in values for value in row)
    means = [statistics.fmean(row) for row in values]
    unit = max(means) or 1.0
    scaled = [[math.log(value) if are_ratios else value / unit for value in row] for row in values]
    limit = math.log1p(margin) if are_ratios else margin
    confidence = 1 - (_CHANCE if figure is GOODPUT else _CHANCE / _NUM_OTHERS)

    def ratio(change: float) -> float | None:
        if not math.isfinite(change):
            return None
        if are_ratios:
            return math.exp(change)
        return 1 + change * unit / means[0] if means[0] else None

    found = []
    for cluster, difference in zip(list(runs)[1:], differences(scaled, confidence), strict=True):
        outcome = _outcome(difference, limit, is_gain=figure.is_gain)
        bounds = (ratio(difference.value), ratio(difference.low), ratio(difference.high))
        more = _more_repetitions(scaled, limit, confidence) if outcome is Outcome.UNCLEAR else None
        found.append(Comparison(cluster, figure.name, *bounds, outcome, more))
    return found


def _outcome(difference: Difference, margin: float, *, is_gain: bool) -> Outcome:
    value, low, high = difference.value, difference.low, difference.high
    if not is_gain:
        value, low, high = -value, -high, -low
    if low > 0 and value >= margin:
        return Outcome.BETTER
    if high < 0 and value <= -margin:
        return Outcome.WORSE
    return Outcome.SAME if -margin < low and high < margin else Outcome.UNCLEAR


def _more_repetitions(values: Sequence[Sequence[float]], margin: float, confidence: float) -> int | None:
    num = len(values[0])
    if num < 2:
        return None
    deviation = residual(values)
    numbers = range(num + 1, _MOST_REPETITIONS + 1)
    return next((more for more in numbers if half_width(deviation, len(values), more, confidence) < margin), None)


@dataclass(frozen=True)
class _Judgement:
    clusters: Sequence[Cluster]  # the colocated one first
    comparisons: Sequence[Comparison]
    num_repetitions: int
    margin: float

    def verdict(self) -> Verdict:
        answer, cluster, words = self._judged()
        return Verdict(answer, cluster, tuple(words), tuple(self.comparisons))

    def _judged(self) -> tuple[Answer, Cluster, list[str]]:
        colocated, *splits = self.clusters
        goodput = {each.cluster: each for each in self.comparisons if each.figure == GOODPUT.name}
        winners = [split for split in splits if goodput[split].outcome is Outcome.BETTER]
        if winners:
            best = max(winners, key=lambda split: _size(goodput[split]))
            return Answer.SPLIT, best, [f"Yes: split this load, as {best}.", *self._said(best)]
        left = [split for split in splits if goodput[split].outcome is not Outcome.WORSE]
        if not left:
            best = max(splits, key=lambda split: _size(goodput[split]))
            return Answer.COLOCATED, colocated, [f"No: serve this load colocated, as {colocated}.", *self._said(best)]
        best = max(left, key=self._merit)
        better, worse = self._of(best, Outcome.BETTER), self._of(best, Outcome.WORSE)
        unclear = any(self._of(split, Outcome.UNCLEAR) for split in left)
        if better and not worse:
            return Answer.SPLIT, best, [f"Yes: split this load, as {best}.", *self._said(best)]
        if better:
            words = [f"It depends on what counts for you: {best} is better in one figure and worse in another."]
            return Answer.DEPENDS, best, [*words, *self._said(best)]
        if worse:
            return Answer.COLOCATED, colocated, [f"No: serve this load colocated, as {colocated}.", *self._said(best)]
        if unclear:
            words = [
                "This measurement cannot tell: what differs may be chance."
                if self.num_repetitions > 1
                else "One repetition cannot tell: whatever differs may be chance. Give --repetitions 4 or more.",
                f"Until more is known, stay colocated ({colocated}): it is simpler.",
            ]
            return Answer.UNCLEAR, colocated, [*words, *self._said(best)]
        words = [f"It makes no difference: stay colocated ({colocated}), which is simpler."]
        return Answer.SAME, colocated, [*words, *self._said(best)]

    def _merit(self, split: Cluster) -> tuple[bool, bool, int]:
        """For an order: who is better and nowhere worse, then who is better in something, then in more than worse."""
        num_better, num_worse = len(self._of(split, Outcome.BETTER)), len(self._of(split, Outcome.WORSE))
        return num_better > 0 == num_worse, num_better > 0, num_better - num_worse

    def _of(self, cluster: Cluster, outcome: Outcome) -> list[Comparison]:
        return [each for each in self.comparisons if each.cluster == cluster and each.outcome is outcome]

    def _said(self, cluster: Cluster) -> list[str]:
        """How a split's figures lie beside the colocated cluster's: one sentence of each outcome."""
        said = []
        for outcome, words in (
            (Outcome.BETTER, "is better in"),
            (Outcome.WORSE, "is worse in"),
            (Outcome.SAME, f"differs by less than {self.margin:.0%} in"),
            (Outcome.UNCLEAR, "cannot be told apart in"),
        ):
            if found := self._of(cluster, outcome):
                said.append(f"{cluster} {words} {_listed([_named(each) for each in found])}.")
        more = [each.more for each in self._of(cluster, Outcome.UNCLEAR) if each.more is not None]
        if more:
            said.append(
                f"--repetitions {max(more)} would show a difference of {self.margin:.0%} in these, by their noise."
            )
        return said


def _size(comparison: Comparison) -> float:
    """For an order; a gain from nothing is the greatest."""
    return math.inf if comparison.ratio is None else comparison.ratio


def _named(comparison: Comparison) -> str:
    title = next(figure.title for figure in FIGURES if figure.name == comparison.figure).partition(",")[0]
    if comparison.ratio is None:
        return f"{title} (colocated has none)" if comparison.outcome is Outcome.BETTER else title
    if comparison.low is None or comparison.high is None:
        return f"{title} ({comparison.ratio:.2f} ×)"
    return f"{title} ({comparison.ratio:.2f} ×, {max(0.0, comparison.low):.2f} to {comparison.high:.2f})"


def _listed(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
