"""The same question to the simulator: no cluster is started, steps only take time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from tandem.advise.clusters import Cluster
from tandem.advise.measure import AdviceRun
from tandem.advise.verdict import RunFigures
from tandem.bench.load.records import Slo
from tandem.bench.load.traces import Cut, cut_to
from tandem.bench.load.workload import poisson_arrivals
from tandem.bench.report.summary import distribution
from tandem.bench.session import Shape, Workload
from tandem.core.errors import ConfigError
from tandem.sim.load import Arrival
from tandem.sim.outcome import Outcome
from tandem.sim.scenario import Scenario, read_scenario
from tandem.sim.shape import WorldShape
from tandem.sim.world import World


@dataclass
class Simulation:
    """What is simulated.

    Attributes:
        scenario: its workers, their number aside; its load counts for nothing.
        cut: what did not fit; `None`: nobody asked for it.
    """

    scenario: Scenario
    workload: Workload
    shape: Shape
    slo: Slo
    cut: Cut | None = None

    @classmethod
    def of(cls, path: Path, workload: Workload, shape: Shape, slo: Slo) -> Simulation:
        """The targets that `slo` leaves open are the scenario's.

        Raises:
            ConfigError: the file is no scenario, or the load has no times.
        """
        scenario = read_scenario(path)
        if shape.concurrency is not None:
            raise ConfigError("a simulation takes a load with times: a trace, or --rate", key="--concurrency")
        if shape.rate is None and any(entry.arrival_s is None for entry in workload.entries):
            raise ConfigError("this load has no arrival times: give --rate", key="--rate")
        world = scenario.shape()
        slo = Slo(slo.ttft_s or world.ttft_s, slo.tpot_s or world.tpot_s)
        cut = None
        if workload.max_len is not None:
            if workload.max_len < 2:
                raise ConfigError("a scenario has no context: give its tokens to --cut", key="--cut")
            entries, cut = cut_to(workload.entries, workload.max_len)
            workload = replace(workload, entries=entries)
        return cls(scenario, workload, shape, slo, cut)

    @property
    def is_exact(self) -> bool:
        """A trace has its own times, so that another repetition would be the same; by chance none is as the other."""
        return self.shape.rate is None

    def run(self, cluster: Cluster, repetition: int) -> AdviceRun:
        """Raises `ConfigError` where a request fits into no worker."""
        arrivals = self._arrivals(repetition)
        outcomes = World(self._world(cluster, arrivals)).run(arrivals)
        figures = simulated_figures(outcomes, self.slo)
        remarks = tuple(f"{number} failed: {kind}" for kind, number in figures["num_failed"].items())
        return AdviceRun(cluster, repetition, figures, remarks)

    def _world(self, cluster: Cluster, arrivals: Sequence[Arrival]) -> WorldShape:
        shape = self.scenario.shape(arrivals)
        return replace(
            shape,
            prefill=replace(shape.prefill, num_workers=cluster.num_prefill, bounds=None, others=()),
            decode=replace(shape.decode, num_workers=cluster.num_decode, bounds=None, others=()),
            ttft_s=self.slo.ttft_s or shape.ttft_s,
            tpot_s=self.slo.tpot_s or shape.tpot_s,
        )

    def _arrivals(self, repetition: int) -> list[Arrival]:
        entries = self.workload.entries
        times: Sequence[float] = [entry.arrival_s or 0.0 for entry in entries]
        if self.shape.rate is not None:
            times = poisson_arrivals(len(entries), self.shape.rate, str(self.workload.seed + repetition - 1))
        return [
            Arrival(number, time_s, entry.num_input, entry.num_output, entry.block_ids, entry.block_size)
            for number, (time_s, entry) in enumerate(zip(times, entries, strict=True))
        ]


def simulated_figures(outcomes: Sequence[Outcome], slo: Slo) -> RunFigures:
    """What a run has for the verdict, of at least one request. Of gaps only the longest of each request is known.

    A request that failed, or was refused, is in no latency and no throughput, and has not kept its targets.
    """
    good = [one for one in outcomes if not one.error]
    begin_s = min(one.arrival.arrived_s for one in outcomes)
    duration_s = max((one.last_token_s for one in good), default=begin_s) - begin_s
    per_s = 1 / duration_s if duration_s > 0 else 0.0
    num_kept = sum(one.keeps(slo.ttft_s or 0.0, slo.tpot_s or 0.0) for one in good)
    latencies = {
        "ttft_s": [one.ttft_s for one in good],
        "tpot_s": [one.tpot_s for one in good if one.tpot_s is not None],
        "longest_gap_s": [one.longest_gap_s for one in good if one.num_tokens > 1],
    }
    found = {name: distribution(values) for name, values in latencies.items()}
    return {
        "duration_s": duration_s,
        "num_requests": len(outcomes),
        "num_failed": dict(sorted(Counter(one.error for one in outcomes if one.error).items())),
        "output_tokens_per_s": sum(one.num_tokens for one in good) * per_s,
        "goodput": {"num_good": num_kept, "share": num_kept / len(outcomes), "per_s": num_kept * per_s},
        **{name: None if values is None else asdict(values) for name, values in found.items()},
    }
