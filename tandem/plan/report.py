"""What `tandem plan size` says of what it found."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table

from tandem.plan.plan_file import LEAST_POWER, MOST_GOODPUT, Plan, TypeSpec
from tandem.plan.search import price
from tandem.plan.simulate import Kept
from tandem.plan.size import Found


def report(plan: Plan, types: dict[str, TypeSpec], found: Found) -> Iterator[str | Table]:
    """The pools, why no fewer do, and how far they carry."""
    unit = "W" if plan.goal == LEAST_POWER else "an hour"
    kept, targets = found.kept, plan.slo
    yield f"[bold]{found.best}[/bold]: {price(plan, types, found.best):,.2f} {unit}"
    at = f" of {found.speed:.2f} x the load" if plan.goal == MOST_GOODPUT else ""
    yield (
        f"{kept.both:.1%} of the requests{at} ({kept.rate:.2f} a second) keep both targets: "
        f"TTFT {targets.ttft_ms:g} ms {kept.ttft:.1%}, TPOT {targets.tpot_ms:g} ms {kept.tpot:.1%}"
    )
    yield f"\nWhy: {why(found, targets.share)}"
    around = {"as found": kept, **found.fewer, **found.changed}
    table = Table("", "both", "TTFT", "TPOT", "prefill busy", "decode batch", box=None)
    for name, one in around.items():
        table.add_row(name, *_shares(one))
    for column in table.columns[1:]:
        column.justify = "right"
    yield ""
    yield table
    if len(found.by_pair) > 1:
        title = "x the load" if plan.goal == MOST_GOODPUT else unit
        others = Table("types", title, box=None)
        for pools, value in found.by_pair:
            others.add_row(str(pools), f"{value:,.2f}")
        yield ""
        yield others


def why(found: Found, share: float) -> str:
    """What one worker less of each role would break, and what its worker is bound by."""
    said = []
    prefill, decode = found.fewer.get("one prefill worker less"), found.fewer.get("one decode worker less")
    if prefill is not None:
        said.append(_broken("prefill", prefill, share, "computing prompts"))
    if decode is not None:
        said.append(_broken("decode", decode, share, found.pair.bound_decode))
    if not said:
        return "one worker of each role is enough"
    return "; ".join(said)


def _broken(role: str, kept: Kept, share: float, bound: str) -> str:
    if kept.both >= share:
        return f"a {role} worker less would do for this load, and was not cheaper by another choice"
    which = "TTFT" if kept.ttft < kept.tpot else "TPOT"
    return f"with one {role} worker less {kept.both:.0%} keep both (bound by {bound}; {which} breaks first)"


def _shares(kept: Kept) -> tuple[str, ...]:
    shares = kept.both, kept.ttft, kept.tpot, kept.busy_prefill
    return *(f"{value:.1%}" for value in shares), f"{kept.decode_batch:,.1f}"
