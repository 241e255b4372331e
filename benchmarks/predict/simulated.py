"""What a simulation says of a load, in the figures of a measurement."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from benchmarks.law.loads import closed_of
from benchmarks.predict.loads import Load
from tandem.bench.load.records import RequestRecord
from tandem.bench.report.summary import Distribution, Summary, distribution
from tandem.core.errors import TandemError
from tandem.sim.load import Arrival
from tandem.sim.outcome import Outcome
from tandem.sim.shape import WorldShape
from tandem.sim.world import World


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one run; seconds."""

    output_tokens_per_s: float
    e2e_s: float
    tpot_s: float
    ttft_p50_s: float
    ttft_p99_s: float

    def as_json(self) -> dict[str, float]:
        return asdict(self)


#: How far off a prediction may be, relative; or as far as real runs are from each other, where that is more.
GOALS: Mapping[str, float] = {
    "output_tokens_per_s": 0.05, "e2e_s": 0.05, "tpot_s": 0.05, "ttft_p50_s": 0.10, "ttft_p99_s": 0.20,
}  # fmt: skip


def measured(summary: Summary) -> Figures:
    """Raises `TandemError` where requests failed."""
    if summary.num_failed or summary.ttft_s is None or summary.e2e_s is None or summary.tpot_s is None:
        raise TandemError(f"requests failed: {summary.num_failed}, such as: {summary.failure_examples}")
    return _figures(summary.output_tokens_per_s, summary.e2e_s, summary.tpot_s, summary.ttft_s)


@dataclass(frozen=True, slots=True)
class Recorded:
    """A load that a real cluster has served."""

    load: Load
    records: Sequence[RequestRecord]


def outcomes(shape: WorldShape, recorded: Recorded, before: Sequence[Recorded] = ()) -> tuple[float, list[Outcome]]:
    """When it began, and how it went: as many clients ask the same in the same order as was recorded, or requests come
    when they were sent.

    Args:
        before: what the cluster had served by then. What it has learnt of its workers, such as how fast they are,
            decides how much it places at once.
    """
    world, num_before = World(shape), 0
    for each in before:
        _serve(world, each, num_before)
        num_before += len(each.records)
    return world.kernel.now_s, _serve(world, recorded, num_before)


def _serve(world: World, recorded: Recorded, first_number: int) -> list[Outcome]:
    records, began_s = recorded.records, world.kernel.now_s
    lengths = [(record.num_input or record.num_input_asked or 0, record.num_output) for record in records]
    if num_clients := recorded.load.num_clients:
        return closed_of(world, lengths, num_clients, first_number)
    world.on_end = lambda _: None
    pairs = zip(records, lengths, strict=True)
    return world.run(
        [Arrival(first_number + record.number, began_s + record.sent_s, *each) for record, each in pairs]
    )


def figures_of(found: Sequence[Outcome], began_s: float = 0.0) -> Figures:
    ends_s = max(one.last_token_s for one in found) - began_s
    e2e_s, ttft_s = (distribution([getattr(one, name) for one in found]) for name in ("e2e_s", "ttft_s"))
    tpot_s = distribution([one.tpot_s for one in found if one.tpot_s is not None])
    assert e2e_s is not None
    assert ttft_s is not None
    assert tpot_s is not None
    return _figures(sum(one.num_tokens for one in found) / ends_s, e2e_s, tpot_s, ttft_s)


def _figures(tokens_per_s: float, e2e_s: Distribution, tpot_s: Distribution, ttft_s: Distribution) -> Figures:
    return Figures(tokens_per_s, e2e_s.mean, tpot_s.mean, ttft_s.p50, ttft_s.p99)


def off(said: float, runs: Sequence[float]) -> float:
    """Of a prediction, relative to the mean of real runs."""
    mean = sum(runs) / len(runs)
    return said / mean - 1


def is_met(name: str, said: float, runs: Sequence[float]) -> bool:
    """Near enough to the mean of the runs, or not farther from it than one of them is."""
    mean = sum(runs) / len(runs)
    return abs(said - mean) <= max(GOALS[name] * mean, *(abs(run - mean) for run in runs))
