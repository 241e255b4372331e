"""KV in pages, and in one run of memory for each sequence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.studies.schedulers import contiguous
from benchmarks.studies.study import Found, Study, Value, Variant
from benchmarks.studies.words import per_cent

LONGEST = 4096
PAGES = "pages"
KNOWN = "contiguous, lengths known (ours to compare)"
RESERVED = f"contiguous, room for {LONGEST:,} (ours to compare)"
_ROOMS = (20_000, 40_000, 80_000)


def _used(figures: Mapping[str, Any]) -> float:
    """Of the slots that are taken."""
    return float(figures["held_share"] / figures["taken_share"])


def _says(found: Found) -> str:
    pages, known, reserved = (found[variant, "40,000"] for variant in (PAGES, KNOWN, RESERVED))
    return (
        f"With room for 40,000 tokens, {pages['num_running']:.0f} requests generate at once in pages, and "
        f"{reserved['num_running']:.0f} where each has a run of {LONGEST:,} slots, of which "
        f"{per_cent(_used(reserved))} hold a token: the rest is kept for an answer that does not come. "
        f"Were each answer's length known beforehand, {known['num_running']:.0f} would: room for tokens that are yet "
        f"to come lies empty meanwhile ({per_cent(_used(known))} of what is taken holds one), and what is free lies in "
        "pieces between neighbours, of which none may be long enough for the next. "
        f"Pages are taken as tokens come, and {per_cent(_used(pages))} of their slots hold one, at the price that they "
        f"may run out, which routers and reservations prevent but for {pages['num_preemptions']} that had to "
        "give up their own and were computed again."
    )


STUDY = Study(
    name="memory",
    title="Contiguous and paged memory",
    scenario="short_of_memory.yaml",
    setting="room for tokens",
    values=[Value(f"{room:,}", {"decode": {"tokens": room}}) for room in _ROOMS],
    variants=[
        Variant(RESERVED, make_scheduler=contiguous(LONGEST)),
        Variant(KNOWN, make_scheduler=contiguous(None)),
        Variant(PAGES),
    ],
    columns=(
        "tokens_per_s", "ttft_p50_s", "tpot_p50_s", "kept_per_s", "num_running", "taken_share", "held_share",
        "num_preemptions",
    ),
    panels=("tokens_per_s", "num_running"),
    says=_says,
)  # fmt: skip
