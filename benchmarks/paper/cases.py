"""What is simulated for the comparisons: a process does one of these at a time. Plain data comes out."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from benchmarks.paper.clusters import (
    BATCH,
    CLAIMS,
    CLUSTERS,
    DESIGNS,
    FOR_CODE,
    ISO_COST,
    ISO_POWER,
    ISO_THROUGHPUT,
    PUBLISHED_BATCH,
    WORKLOADS,
    WRONG_WORKLOAD,
    Cluster,
)
from benchmarks.paper.load import Lengths
from benchmarks.paper.search import frontier, hardest
from benchmarks.paper.slo import missed
from benchmarks.paper.systems import SPLITWISE, TANDEM, TANDEM_ON_PROFILE, System
from benchmarks.splitwise_oracle.times import read_profile

#: Of what is cheapest, needs the least power, and has the fewest machines.
LEAST = ("cost", "power", "machines")


@dataclass(frozen=True)
class PaperSizes:
    """Attributes:
    rates: among which throughput is searched, requests a second.
    seconds: of Splitwise's loads. `short_s`: of those that ship, and of where Splitwise's search begins.
    provision_rate, provision_s: of the load for which the least is searched; `tandem_provision_s` with those that ship.
    most_a100, most_h100: machines of a pool; of a cluster without a split twice as many.
    batch_rate: that is more than any cluster serves.
    """

    rates: tuple[int, ...] = tuple(range(10, 401, 10))
    seconds: float = 600.0
    short_s: float = 30.0
    provision_rate: int = 70
    provision_s: float = 120.0
    tandem_provision_s: float = 15.0
    most_a100: int = 69
    most_h100: int = 39
    batch_rate: int = 180
    seed: int = 0


#: To see that all of it runs.
QUICK = PaperSizes((10, 20, 30), 6.0, 3.0, 10, 3.0, 3.0, most_a100=4, most_h100=3, batch_rate=40)


@dataclass(frozen=True)
class Bench:
    """What all cases need: sizes, and where traces and profile lie."""

    sizes: PaperSizes
    traces: Path
    profile: Path

    def system(self, name: str) -> System:
        return System(name, read_profile(self.profile))

    def lengths(self, workload: str) -> Lengths:
        return Lengths.of(self.traces, workload)


class Case(Protocol):
    """One unit of work; `key` names it in the file."""

    @property
    def key(self) -> str: ...

    @property
    def system(self) -> str: ...

    def measure(self, bench: Bench) -> dict[str, Any]: ...


@dataclass
class _Trials:
    """What was tried, each once.

    Attributes:
        missed: the objectives that were not kept, by cluster, rate and seconds of the load.
    """

    system: System
    lengths: Lengths
    seed: int
    missed: dict[tuple[Cluster, int, float], list[str]] = field(default_factory=dict)

    def passes(self, cluster: Cluster, rate: int, seconds: float) -> bool:
        key = cluster, rate, seconds
        if key not in self.missed:
            arrivals = self.lengths.drawn(rate, seconds, self.seed)
            self.missed[key] = missed(arrivals, self.system.reference, partial(self.system.times, cluster, arrivals))
        return not self.missed[key]


@dataclass(frozen=True)
class Throughput:
    """The highest rate at which a cluster keeps all nine objectives."""

    system: str
    workload: str
    cluster: Cluster

    @property
    def key(self) -> str:
        return f"throughput: {self.workload}, {self.cluster}, {self.system}"

    def measure(self, bench: Bench) -> dict[str, Any]:
        """By a shorter load first, and from there by the whole one."""
        sizes, trials = bench.sizes, _Trials(bench.system(self.system), bench.lengths(self.workload), bench.sizes.seed)
        seconds, first_s = sizes.seconds, sizes.short_s
        if self.system != SPLITWISE:
            seconds, first_s = sizes.short_s, sizes.short_s / 5
        start = len(sizes.rates) // 4
        short_rate = hardest(lambda rate: trials.passes(self.cluster, rate, first_s), sizes.rates, start)
        start = sizes.rates.index(short_rate or sizes.rates[0])
        rate = hardest(lambda rate: trials.passes(self.cluster, rate, seconds), sizes.rates, start)
        tried = [
            {"rate": rate, "seconds": of_load_s, "missed": missed}
            for (_, rate, of_load_s), missed in sorted(trials.missed.items(), key=lambda item: item[0][1:])
        ]
        return {"rate": rate, "seconds": seconds, "short_rate": short_rate, "tried": tried}


@dataclass(frozen=True)
class Least:
    """The clusters of a design that keep all objectives at one rate with the least cost, power and machines."""

    system: str
    workload: str
    design: str

    @property
    def key(self) -> str:
        return f"least: {self.workload}, {self.design}, {self.system}"

    def measure(self, bench: Bench) -> dict[str, Any]:
        sizes, design = bench.sizes, DESIGNS[self.design]
        trials = _Trials(bench.system(self.system), bench.lengths(self.workload), sizes.seed)
        seconds = sizes.provision_s if self.system == SPLITWISE else sizes.tandem_provision_s
        most = [sizes.most_a100 if hardware.name.startswith("a100") else sizes.most_h100
                for hardware in (design.prompt, design.token)]  # fmt: skip
        best: dict[str, Cluster] = {}

        def passes(*nums: int) -> bool:
            cluster = Cluster(self.design, *nums)
            if not trials.passes(cluster, sizes.provision_rate, seconds):
                return False
            for what in LEAST:
                if what not in best or amount(cluster, what) < amount(best[what], what):
                    best[what] = cluster
            return True

        def is_wanted(*nums: int) -> bool:
            cluster = Cluster(self.design, *nums)
            return any(what not in best or amount(cluster, what) < amount(best[what], what) for what in LEAST)

        if design.is_split:
            frontier(passes, (most[0], most[1]), is_wanted)
        else:
            numbers = range(2 * most[0] + 1, 0, -1)
            hardest(passes, numbers, len(numbers) // 2)
        found = {what: [cluster.num_prompt, cluster.num_token] for what, cluster in best.items()}
        return {"least": found, "rate": sizes.provision_rate, "seconds": seconds, "num_tried": len(trials.missed)}


@dataclass(frozen=True)
class Batch:
    """What a cluster ends a second where always more waits."""

    cluster: Cluster
    workload: str = "conv"
    system: str = SPLITWISE

    @property
    def key(self) -> str:
        return f"batch: {self.workload}, {self.cluster}, {self.system}"

    def measure(self, bench: Bench) -> dict[str, Any]:
        """Between a tenth and nine tenths of the load."""
        sizes = bench.sizes
        arrivals = bench.lengths(self.workload).drawn(sizes.batch_rate, sizes.seconds, sizes.seed)
        times = bench.system(self.system).times(self.cluster, arrivals)
        begin_s, end_s = 0.1 * sizes.seconds, 0.9 * sizes.seconds
        ends_s = [each.time_s + found.e2e_s for each, found in zip(arrivals, times, strict=True) if found is not None]
        num = sum(begin_s <= at_s < end_s for at_s in ends_s)
        return {"rate": sizes.batch_rate, "seconds": sizes.seconds, "per_s": num / (end_s - begin_s)}


def amount(cluster: Cluster, what: str) -> float:
    """Its cost, power, or number of machines."""
    return {"cost": cluster.cost, "power": cluster.power, "machines": cluster.num_machines}[what]


def cases_of(scenario: str) -> list[Case]:
    """All that a scenario needs; what another one needs as well has the same key."""
    if scenario in (ISO_POWER, ISO_COST):
        return [
            Throughput(system, workload, cluster)
            for workload in WORKLOADS
            for cluster in CLUSTERS[scenario, workload]
            for system in (SPLITWISE, TANDEM, TANDEM_ON_PROFILE)
            if workload == "conv" or system != TANDEM_ON_PROFILE
        ]
    if scenario == WRONG_WORKLOAD:
        both = FOR_CODE + tuple(cluster for cluster in CLUSTERS[ISO_POWER, "conv"] if cluster.is_split)
        return [Throughput(system, "conv", cluster) for cluster in both for system in (SPLITWISE, TANDEM)]
    if scenario == ISO_THROUGHPUT:
        claimed = {name for claim in CLAIMS if claim.scenario == scenario for name in (claim.of, claim.to)}
        return [
            *(Least(SPLITWISE, workload, design) for workload in WORKLOADS for design in DESIGNS),
            *(Least(TANDEM, "conv", design) for design in DESIGNS if design in claimed),
        ]
    assert scenario == BATCH
    return [Batch(cluster) for cluster in CLUSTERS[ISO_COST, "conv"] if cluster.design in PUBLISHED_BATCH]


def measured(case: Case, bench: Bench) -> tuple[str, dict[str, Any]]:
    """Its key, and what was found, with the CPU time that it took."""
    cpu_s = time.process_time()
    found = case.measure(bench)
    return case.key, {**found, "cpu_s": round(time.process_time() - cpu_s, 1)}
