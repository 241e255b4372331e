"""A replay on the page index, as a table of the terminal and as plain data."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from rich.table import Table

from tandem.bench.cache_replay import CacheFigures, CacheSpec
from tandem.bench.machine import now, versions
from tandem.bench.report.summary import PERCENTILES, percentile

FORMAT = "tandem-bench-cache/1"
_PLACEMENTS = {True: "placed by what is held", False: "by load alone"}


def trace_table(found: CacheFigures) -> Table:
    """What the trace itself holds."""
    table = Table(show_header=False, box=None)
    table.add_row("requests", f"{found.num_requests:,}")
    table.add_row("prompt tokens", f"{found.num_tokens:,}")
    table.add_row("blocks", f"{found.num_blocks:,}, {found.num_distinct_blocks:,} different")
    table.add_row("seen before", f"{found.possible_ratio:.4f} of all blocks: what one endless cache holds")
    return table


def cache_table(replays: Sequence[tuple[CacheSpec, CacheFigures]]) -> Table:
    """A column for each replay. Queues are of the trace's seconds."""
    table = Table("", *(_name(spec) for spec, _ in replays), box=None)
    for column in table.columns[1:]:
        column.justify = "right"
    founds = [found for _, found in replays]
    table.add_row("held, of all blocks", *(f"{found.hit_ratio:.4f}" for found in founds))
    table.add_row("held, of those seen before", *(_of_possible(found) for found in founds))
    table.add_row("held, of all tokens", *(f"{found.token_ratio:.4f}" for found in founds))
    table.add_row("blocks given up", *(f"{found.num_given_up:,}" for found in founds))
    if len(founds[0].workers) > 1:  # a single one is no server of a whole trace
        table.add_row("tokens, busiest worker / mean", *(f"{found.imbalance:.2f}" for found in founds))
        for percent in PERCENTILES:
            waits = (f"{percentile(found.queued_s, percent):,.2f} s" for found in founds)
            table.add_row(f"in queues, p{percent}", *waits)
    return table


def _name(spec: CacheSpec) -> str:
    return "one worker" if spec.num_workers == 1 else _PLACEMENTS[spec.finds_prefixes]


def _of_possible(found: CacheFigures) -> str:
    return f"{found.num_held_blocks / found.num_seen_blocks:.1%}" if found.num_seen_blocks else ""


def document(options: dict[str, Any], replays: Sequence[tuple[CacheSpec, CacheFigures]]) -> dict[str, Any]:
    """Everything as plain data; of the times in queues (seconds) the percentiles."""
    return {
        "format": FORMAT,
        "date": now(),
        "options": options,
        "versions": versions(),
        "replays": [{"spec": dataclasses.asdict(spec), "figures": _figures(found)} for spec, found in replays],
    }


def _figures(found: CacheFigures) -> dict[str, Any]:
    queued = {f"p{percent}": percentile(found.queued_s, percent) for percent in PERCENTILES}
    ratios = {name: getattr(found, name) for name in ("hit_ratio", "possible_ratio", "token_ratio", "imbalance")}
    return dataclasses.asdict(found) | ratios | {"queued_s": queued}
