"""Figures as tables of a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.table import Table

from tandem.bench.report.results import Run
from tandem.bench.report.summary import Distribution, Summary, TurnFigures

#: The latencies of a summary: title and attribute, as they are shown everywhere.
LATENCIES = (
    ("TTFT", "ttft_s"),
    ("TPOT", "tpot_s"),
    ("ITL", "itl_s"),
    ("first to second token", "second_gap_s"),
    ("E2E", "e2e_s"),
)
_WELL_BELOW_A_CORE = 0.5
_LATE_S = 0.01


def latency_table(summary: Summary) -> Table:
    """Milliseconds."""
    table = Table("ms", "mean", "p50", "p90", "p99", "max", box=None)
    for column in table.columns[1:]:
        column.justify = "right"
    for name, attribute in LATENCIES:
        found: Distribution | None = getattr(summary, attribute)
        values = (found.mean, found.p50, found.p90, found.p99, found.max) if found else ()
        table.add_row(name, *(f"{value * 1e3:,.1f}" for value in values))
    return table


def count_table(run: Run) -> Table:
    """Requests, tokens, throughput, and the generator's own share of the machine."""
    summary = run.summary
    table = Table(show_header=False, box=None)
    table.add_row("duration", f"{summary.duration_s:,.1f} s")
    table.add_row("requests", f"{summary.num_succeeded:,} of {summary.num_requests:,} succeeded")
    table.add_row("request throughput", f"{summary.requests_per_s:,.3f} /s")
    table.add_row("output throughput", f"{summary.output_tokens_per_s:,.1f} tokens/s")
    table.add_row("total throughput", f"{summary.total_tokens_per_s:,.1f} tokens/s")
    table.add_row("tokens", f"{summary.num_input_tokens:,} in, {summary.num_output_tokens:,} out")
    if summary.goodput is not None:
        found = summary.goodput
        table.add_row("goodput", f"{found.per_s:,.3f} /s, {found.share:.1%} of the requests kept the SLO")
    if summary.cache is not None:
        use = summary.cache
        cached = f"{use.num_cached_tokens:,} of {use.num_input_tokens:,} prompt tokens, {use.hit_ratio:.1%}"
        table.add_row("cached", cached)
        if use.of_possible is not None:
            table.add_row("", f"{use.of_possible:.1%} of {use.num_repeated_tokens:,} that were there before")
    table.add_row("generator", f"{run.load.cpu_share:.1%} of a core")
    return table


def turn_table(turns: Sequence[TurnFigures]) -> Table:
    """The turns of conversations: TTFT in milliseconds, and what of their prompts was cached."""
    table = Table(
        "turn", "answers", "prompt tokens", "TTFT mean", "p50", "p90", "p99", "cached", "of possible", box=None
    )
    for column in table.columns:
        column.justify = "right"
    for turn in turns:
        ttft, cache = turn.ttft_s, turn.cache
        times = (ttft.mean, ttft.p50, ttft.p90, ttft.p99) if ttft else (0.0,) * 4
        of_possible = cache.of_possible if cache else None
        table.add_row(
            str(turn.turn),
            f"{turn.num:,}",
            f"{turn.mean_input_tokens:,.0f}",
            *(f"{time * 1e3:,.1f}" for time in times),
            "" if cache is None else f"{cache.hit_ratio:.1%}",
            "" if of_possible is None else f"{of_possible:.1%}",
        )
    return table


def remarks(run: Run) -> Iterator[str]:
    """What a reader of the figures must know."""
    summary = run.summary
    if run.load.is_partial:
        yield "partial: the run was stopped before its end"
    for kind, number in summary.num_failed.items():
        example = summary.failure_examples.get(kind)
        yield f"{number} failed: {kind}{f' ({example})' if example else ''}"
    if run.load.num_unsent:
        why = "" if run.load.is_partial else ", as one before them failed"
        yield f"{run.load.num_unsent} turns were not sent{why}"
    if summary.num_short:
        yield f"{summary.num_short} requests got fewer tokens than they asked for"
    if summary.num_wrong_input:
        yield f"{summary.num_wrong_input} prompts have another length by the server's count than was sent"
    for source in ("limit", "events"):
        if num_answers := summary.token_sources.get(source):
            yield f"{num_answers} answers came without usage; their tokens are counted by the {source}"
    if summary.num_succeeded and summary.cache is None and any(record.num_repeated for record in run.load.records):
        yield "prompts repeat earlier ones, but the server does not tell what it had cached"
    if summary.num_events and summary.num_output_tokens > 1.05 * summary.num_events:
        per_event = summary.num_output_tokens / summary.num_events
        yield f"an event brings {per_event:.2f} tokens: ITL is between events, TPOT between tokens"
    if run.load.cpu_share > _WELL_BELOW_A_CORE:
        yield f"the generator used {run.load.cpu_share:.0%} of a core: it may be what was measured"
    if summary.lateness_s is not None and summary.lateness_s.p99 > _LATE_S:
        yield f"requests left up to {summary.lateness_s.p99 * 1e3:.0f} ms (p99) after their time"


def probe_table(runs: Sequence[Run]) -> Table:
    """The probes of a search, in the order of their rates."""
    table = Table("rate /s", "kept the SLO", "TTFT p90 ms", "TPOT p90 ms", "tokens/s", "", box=None)
    for run in sorted(runs, key=lambda run: run.shape.rate or 0.0):
        summary = run.summary
        share = summary.goodput.share if summary.goodput else 0.0
        latencies = [f"{found.p90 * 1e3:,.1f}" if found else "" for found in (summary.ttft_s, summary.tpot_s)]
        note = "stopped early" if run.load.is_partial else ""
        table.add_row(f"{run.shape.rate:.3f}", f"{share:.1%}", *latencies, f"{summary.output_tokens_per_s:,.1f}", note)
    return table
