"""How figures are named and shown."""

from __future__ import annotations

TITLES = {
    "tokens_per_s": "output tokens/s",
    "ttft_p50_s": "TTFT p50, ms",
    "ttft_p99_s": "TTFT p99, ms",
    "tpot_p50_s": "TPOT p50, ms",
    "tpot_p99_s": "TPOT p99, ms",
    "gap_p99_s": "longest gap p99, ms",
    "handoff_p50_s": "handoff p50, ms",
    "handoff_p99_s": "handoff p99, ms",
    "kept_share": "kept targets, %",
    "kept_per_s": "goodput, requests/s",
    "by_decode_share": "prompts at decode, %",
    "cached_share": "found in caches, %",
    "num_under_way": "requests under way",
    "num_running": "sequences at once",
    "taken_share": "memory taken, %",
    "held_share": "memory with tokens, %",
    "num_preemptions": "preemptions",
}


def in_unit(name: str, value: float) -> float:
    """In the unit of its title: seconds become milliseconds, and shares per cent."""
    title = TITLES[name]
    return value * (1e3 if title.endswith(", ms") else 100 if title.endswith(", %") else 1)


def cell(name: str, value: float) -> str:
    value = in_unit(name, value)
    return f"{value:,.0f}" if value >= 100 or isinstance(value, int) else f"{value:,.1f}"
