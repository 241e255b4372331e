"""What `tandem plan size` says of what it found."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table

from tandem.core.worker_types import TypeSpec
from tandem.plan.calculators import Served
from tandem.plan.plan_file import LEAST_POWER, MOST_GOODPUT, Plan
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
    if plan.served.shape.window:
        on_cpu = types[found.best.decode_type].machine.card.is_cpu  # and so is prefill, else they would not pair
        yield said_of_windows(plan.served, on_cpu=on_cpu)
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


def said_of_windows(model: Served, *, on_cpu: bool) -> str:
    """Of a model with windows: which layers see one, and of what K and V are kept."""
    windows, kept = model.shape.windows, model.kept(on_cpu=on_cpu)
    groups = kept.groups
    num = "all" if windows.are_everywhere else f"{windows.num_windowed} of {model.shape.layers}"
    said = f"In {num} layers a token sees the last {windows.window:,} tokens; "
    if kept.is_mixed:
        pages = f"{groups.num_windowed} of the {groups.num_of_place} pages of {kept.num_layers} layers"
        return f"{said}behind these, workers on CPUs give back {pages} that each {groups.page_size} tokens have."
    if groups.window:
        block = f", {groups.window - windows.window} of them since kernels of GPUs read whole blocks"
        return f"{said}K and V of the last {groups.window:,} are kept{'' if on_cpu else block}."
    why = "decode steps of GPUs have one table of pages for all layers"
    if on_cpu:
        why = "more layers see all of them" if model.cache.mixed_windows else "cache.mixed_windows is off"
    return f"{said}K and V of all tokens are kept all the same, since {why}."


def _broken(role: str, kept: Kept, share: float, bound: str) -> str:
    if kept.both >= share:
        return f"a {role} worker less would do for this load, and was not cheaper by another choice"
    which = "TTFT" if kept.ttft < kept.tpot else "TPOT"
    return f"with one {role} worker less {kept.both:.0%} keep both (bound by {bound}; {which} breaks first)"


def _shares(kept: Kept) -> tuple[str, ...]:
    shares = kept.both, kept.ttft, kept.tpot, kept.busy_prefill
    return *(f"{value:.1%}" for value in shares), f"{kept.decode_batch:,.1f}"
