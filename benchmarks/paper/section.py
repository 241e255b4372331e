"""Splitwise's comparisons beside what was published, as a section of `docs/benchmarks.md`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.paper.cases import Batch, Least, Throughput, amount
from benchmarks.paper.clusters import (
    CHEAPEST_HH,
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
    Claim,
    Cluster,
)
from benchmarks.paper.systems import SPLITWISE, SYSTEMS, TANDEM, TANDEM_ON_PROFILE
from benchmarks.text import wrapped

FORMAT = "tandem-paper/1"
COMMAND = "`python -m benchmarks paper`"

_TITLES = {ISO_POWER: "power", ISO_COST: "cost", ISO_THROUGHPUT: "throughput",
           WRONG_WORKLOAD: "power, for code"}  # fmt: skip

Cases = dict[str, dict[str, Any]]


def section(content: dict[str, Any]) -> Iterator[str]:
    """Of the scenarios that were simulated."""
    cases: Cases = content["cases"]
    yield ""
    yield "## Splitwise's comparisons, simulated again"
    yield ""
    yield from _introduction(content)
    yield from _claims(cases, content["settings"])
    yield from _throughput(cases)
    yield from _least(cases)
    yield from _batch(cases)


def _introduction(content: dict[str, Any]) -> Iterator[str]:
    sizes, rates = content["settings"], content["settings"]["rates"]
    yield from wrapped(
        f"Simulated by {COMMAND}, so the figures are of no machine (sources {content['code']['digest']}): the clusters "
        "of Splitwise's paper (Patel et al., ISCA 2024) for BLOOM-176B, each machine eight cards. Requests come at "
        "random (Poisson), their prompts and outputs drawn apart from each other from Azure's traces; one seed. A "
        "request's TTFT, TBT and E2E are relative to an A100 machine of its own, and the nine objectives are p50, p90 "
        "and p99 below 2, 3 and 6 for TTFT, below 1.25, 1.5 and 5 for TBT and E2E. Throughput is the highest "
        f"rate that keeps all nine, on a grid of {rates['step']} requests/s from {rates['first']} to {rates['last']}, "
        "found by halving: that a lower rate passes too is taken for granted. A request that did not end counts as "
        "endlessly slow."
    )
    yield ""
    yield from wrapped(
        "*Splitwise* is its simulator written anew ([simulator.md](simulator.md#beside-splitwises-simulator)), loads "
        f"of {sizes['seconds']:g} s. *Tandem* is what ships, on the same machines, links and room for KV, with steps "
        "by roofline, and an A100 by roofline as what requests are relative to; its targets are those of nine in ten "
        "requests for a prompt of median length, and a cluster without a split is colocated. *On its times* is Tandem "
        "with the times of Splitwise's profile, so that only policies differ. To simulate what ships takes longer, so "
        f"its loads are of {sizes['short_s']:g} s; what Splitwise's policies reach in these is beside it. Left out are "
        "the paper's other model, llama2-70b, more seeds, and its times for code with Tandem; an empty cell was not "
        "simulated."
    )
    yield ""
    yield from wrapped(
        "The two models of time differ most where tokens are generated. By Splitwise's times such a step takes an A100 "
        "machine 48 ms with one sequence and 49 ms with 512, whatever their context. By roofline it reads the context "
        "of each sequence too, which has 4 MB a token in this model: full batches of token machines then cost what TBT "
        "allows."
    )


# --- the paper's ratios -----------------------------------------------------------------------------------------------


def _claims(cases: Cases, settings: dict[str, Any]) -> Iterator[str]:
    step = settings["rates"]["step"]
    rows = [(claim, [_ratio(claim, system, cases, step) for system in SYSTEMS]) for claim in CLAIMS]
    rows = [(claim, ratios) for claim, ratios in rows if ratios[0] is not None]
    if not rows:
        return
    yield ""
    yield from wrapped(
        "The ratios that are published. *Within a step*: it lies between the ratios that one step of the grid to "
        f"either side makes of it, {step} requests/s of one of the two rates, or one machine of one of the two "
        "clusters. Where the paper's text does not say which workload or which clusters it compares (†), all are "
        "listed that fit what it says beside, as of their cost, so one of them at most is meant."
    )
    yield ""
    yield "| as much | workload | ratio | published | Splitwise again | within a step | Tandem | on its times |"
    yield "|---|---|---|---:|---:|---|---:|---:|"
    missed = []
    for claim, ratios in rows:
        again, *others = ratios
        assert again is not None
        is_within = again[1] - claim.rounding <= claim.published <= again[2] + claim.rounding
        if not is_within:
            missed.append(claim)
        what = f"{claim.what}, {_short(claim.of)} over {_short(claim.to)}"
        if claim.scenario == WRONG_WORKLOAD:
            what = f"throughput, {_short(claim.of)} over that for conversations"
        mark = " †" if claim.is_open else ""
        cells = [
            f"{claim.published:.2f}{mark}",
            f"{again[0]:.2f}",
            "yes" if is_within else f"**no**: {again[1]:.2f} to {again[2]:.2f}",
            *("" if other is None else f"{other[0]:.2f}" for other in others),
        ]
        yield f"| {_TITLES[claim.scenario]} | {_WORKLOAD_TITLES[claim.workload]} | {what} | {' | '.join(cells)} |"
    yield from _why(missed, cases)


def _pair(claim: Claim) -> Sequence[Cluster]:
    """The two clusters of a claim about given ones."""
    if claim.scenario == WRONG_WORKLOAD:
        (of,) = (cluster for cluster in FOR_CODE if cluster.design == claim.of)
        return of, _named(ISO_POWER, claim.workload, claim.to)
    return _named(claim.scenario, claim.workload, claim.of), _named(claim.scenario, claim.workload, claim.to)


def _named(scenario: str, workload: str, design: str) -> Cluster:
    return next(cluster for cluster in CLUSTERS[scenario, workload] if cluster.design == design)


def _ratio(claim: Claim, system: str, cases: Cases, step: int) -> tuple[float, float, float] | None:
    """It, and the least and the most that one step to either side makes of it; `None`: it was not simulated."""
    if claim.scenario == ISO_THROUGHPUT:
        found = [_fewest(system, claim.workload, design, claim.what, cases) for design in (claim.of, claim.to)]
        if found[0] is None or found[1] is None:
            return None
        return _of_clusters(found[0], found[1], claim.what)
    of, to = _pair(claim)
    if claim.what != "throughput":
        is_there = Throughput(SPLITWISE, claim.workload, of).key in cases
        return _of_clusters(of, to, claim.what) if system == SPLITWISE and is_there else None
    rates = [cases.get(Throughput(system, claim.workload, cluster).key, {}).get("rate") for cluster in (of, to)]
    if not rates[0] or not rates[1]:
        return None
    return _with_moves(rates[0], rates[1], [rates[0] - step, rates[0] + step], [rates[1] - step, rates[1] + step])


def _of_clusters(of: Cluster, to: Cluster, what: str) -> tuple[float, float, float]:
    moved = [[amount(near, what) for near in cluster.neighbours] for cluster in (of, to)]
    return _with_moves(amount(of, what), amount(to, what), *moved)


def _with_moves(of: float, to: float, moved_of: list[float], moved_to: list[float]) -> tuple[float, float, float]:
    ratios = [of / to, *(moved / to for moved in moved_of), *(of / moved for moved in moved_to if moved)]
    return of / to, min(ratios), max(ratios)


def _fewest(system: str, workload: str, design: str, what: str, cases: Cases) -> Cluster | None:
    nums = cases.get(Least(system, workload, design).key, {}).get("least", {}).get(what)
    return None if nums is None else Cluster(design, *nums)


def _why(missed: list[Claim], cases: Cases) -> Iterator[str]:
    """What keeps the clusters of a missed ratio from the next rate."""
    if not missed:
        return
    yield ""
    yield "What the ratios that are missed come from:"
    yield ""
    told = set()
    for claim in missed:
        pair = [] if claim.scenario == ISO_THROUGHPUT else _pair(claim)
        if not pair:
            words = _least_words(claim, cases)
        elif claim.what == "throughput":
            words = "; ".join(_stops(Throughput(SPLITWISE, claim.workload, cluster), cases) for cluster in pair)
        else:
            words = f"{claim.what} is that of {pair[0]} over that of {pair[1]}, which nothing simulated changes"
        told.add(f"- as much {_TITLES[claim.scenario]}, {_WORKLOAD_TITLES[claim.workload]}: {words}.")
    yield from sorted(told)


def _least_words(claim: Claim, cases: Cases) -> str:
    pair = (_fewest(SPLITWISE, claim.workload, design, claim.what, cases) for design in (claim.of, claim.to))
    return f"the least {claim.what} is that of {' and of '.join(map(str, pair))}"


def _stops(case: Throughput, cases: Cases) -> str:
    found = cases[case.key]
    return f"{case.cluster} serves {found['rate']} requests/s, and {_next(found)}"


def _next(found: dict[str, Any]) -> str:
    """By what the lowest rate fails that was tried above the highest one that passes."""
    failed = [one for one in found["tried"] if one["seconds"] == found["seconds"] and one["missed"]]
    if not failed:
        return "nothing more was tried"
    first = min(failed, key=lambda one: one["rate"])
    return f"{first['rate']} fail by {', '.join(first['missed'])}"


# --- all clusters -----------------------------------------------------------------------------------------------------


def _throughput(cases: Cases) -> Iterator[str]:
    for scenario in (ISO_POWER, ISO_COST):
        for workload in WORKLOADS:
            clusters = CLUSTERS[scenario, workload]
            if any(Throughput(SPLITWISE, workload, cluster).key in cases for cluster in clusters):
                title = f"Clusters of as much {_TITLES[scenario]}, {_WORKLOAD_TITLES[workload]}"
                yield from _table(title, workload, clusters, cases)
    if any(Throughput(SPLITWISE, "conv", cluster).key in cases for cluster in FOR_CODE):
        yield from _table("Clusters for code, with conversations", "conv", FOR_CODE, cases)


_WORKLOAD_TITLES = {"conv": "conversations", "code": "code"}


def _table(title: str, workload: str, clusters: Sequence[Cluster], cases: Cases) -> Iterator[str]:
    base = _named(ISO_POWER, workload, "Baseline-H100")
    titles = "Splitwise", "fails next", "shorter loads", "Tandem", "fails next", "on its times"
    yield ""
    yield f"### {title}"
    yield ""
    yield f"Requests a second; cost and power over those of {base}."
    yield ""
    yield f"| cluster | cost | power | {' | '.join(titles)} |"
    yield "|---|---:|---:|---:|---|---:|---:|---|---:|"
    for cluster in clusters:
        found = {system: cases.get(Throughput(system, workload, cluster).key) for system in SYSTEMS}
        cells = [
            f"{cluster.cost / base.cost:.2f}",
            f"{cluster.power / base.power:.2f}",
            _rate(found[SPLITWISE]),
            _failed(found[SPLITWISE]),
            _rate(found[SPLITWISE], "short_rate"),
            _rate(found[TANDEM]),
            _failed(found[TANDEM]),
            _rate(found[TANDEM_ON_PROFILE]),
        ]
        yield f"| {cluster} | {' | '.join(cells)} |"


def _rate(found: dict[str, Any] | None, which: str = "rate") -> str:
    if found is None:
        return ""
    return str(found[which]) if found[which] else "none"


def _failed(found: dict[str, Any] | None) -> str:
    """The first objective that the next rate does not keep."""
    if found is None:
        return ""
    words = _next(found)
    return words.partition(" by ")[2].partition(",")[0]


def _least(cases: Cases) -> Iterator[str]:
    columns = [
        (*column, what)
        for column in ((SPLITWISE, "conv"), (TANDEM, "conv"), (SPLITWISE, "code"))
        for what in ("cost", "power")
    ]
    rows = [
        [design, *(_least_cell(Least(system, workload, design), what, cases) for system, workload, what in columns)]
        for design in DESIGNS
    ]
    rows = [row for row in rows if any(row[1:])]
    if not rows:
        return
    by_system = {key.rpartition(", ")[2]: found for key, found in cases.items() if key.startswith("least: ")}
    rates = {found["rate"] for found in by_system.values()}
    of_loads = ", ".join(f"{_SYSTEM_TITLES[system]} of {found['seconds']:g} s" for system, found in by_system.items())
    yield ""
    yield f"### The least for {', '.join(map(str, sorted(rates)))} requests/s"
    yield ""
    yield from wrapped(
        "Prompt (P) and token machines (T) of the clusters with the least cost and the least power; loads with "
        f"{of_loads}. Not the whole grid is simulated, but the way along the border of what passes. For code the "
        f"paper's cheapest cluster of {_short(CHEAPEST_HH.design)} is {_nums(CHEAPEST_HH)}."
    )
    yield ""
    yield "| design | conversations: cost | power | Tandem: cost | power | code: cost | power |"
    yield "|---|---|---|---|---|---|---|"
    for row in rows:
        yield f"| {' | '.join(row)} |"


_SYSTEM_TITLES = {SPLITWISE: "Splitwise", TANDEM: "Tandem"}


def _least_cell(case: Least, what: str, cases: Cases) -> str:
    if case.key not in cases:
        return ""
    best = _fewest(case.system, case.workload, case.design, what, cases)
    return "none" if best is None else _nums(best)


def _nums(cluster: Cluster) -> str:
    return f"{cluster.num_prompt}P {cluster.num_token}T" if cluster.is_split else str(cluster.num_prompt)


def _batch(cases: Cases) -> Iterator[str]:
    clusters = [cluster for cluster in CLUSTERS[ISO_COST, "conv"] if Batch(cluster).key in cases]
    if not clusters:
        return
    found = cases[Batch(clusters[0]).key]
    yield ""
    yield "### Clusters of as much cost that are overloaded"
    yield ""
    yield from wrapped(
        f"Conversations at {found['rate']} requests/s, by Splitwise's policies: what is ended between a tenth and nine "
        f"tenths of {found['seconds']:g} s."
    )
    yield ""
    yield "| cluster | requests/s | for a unit of cost | published |"
    yield "|---|---:|---:|---:|"
    for cluster in clusters:
        per_s = cases[Batch(cluster).key]["per_s"]
        yield f"| {cluster} | {per_s:.1f} | {per_s / cluster.cost:.2f} | {PUBLISHED_BATCH[cluster.design]:.2f} |"


def _short(design: str) -> str:
    return design.removeprefix("Splitwise-").replace("Baseline-", "")
