"""Slots of a page."""

from __future__ import annotations

from benchmarks.studies.study import Found, Study, Value, Variant
from benchmarks.studies.words import per_cent

_SIZES = (1, 16, 64, 256, 512)
_RATE = 12
PAGES = "pages"


def _says(found: Found) -> str:
    least, usual, large = (found[PAGES, str(size)] for size in (1, 16, 512))
    return (
        "The last page of each sequence is half empty on average: of the slots that are taken, "
        f"{per_cent(usual['held_share'] / usual['taken_share'])} hold a token with pages of 16, and "
        f"{per_cent(large['held_share'] / large['taken_share'])} with pages of 512. "
        f"As long as a page is small beside a request it costs nothing: pages of 1 and of 16 keep the targets of "
        f"{per_cent(least['kept_share'])} and {per_cent(usual['kept_share'])} of the requests, those of 512 of "
        f"{per_cent(large['kept_share'])}. "
        "What small pages cost is not simulated, longer tables and more extents of a handoff; neither is what large "
        "ones lose where prefixes are shared, which only whole pages are."
    )


STUDY = Study(
    name="page_size",
    title="Page size",
    scenario="short_of_memory.yaml",
    setting="slots of a page",
    values=[Value(str(size), {"load": {"rate": _RATE}, "tandem": {"cache": {"page_size": size}}}) for size in _SIZES],
    variants=[Variant(PAGES)],
    columns=(
        "tokens_per_s", "ttft_p50_s", "ttft_p99_s", "tpot_p99_s", "kept_share", "taken_share", "held_share",
        "num_preemptions",
    ),
    panels=("kept_share", "taken_share", "held_share"),
    says=_says,
)  # fmt: skip
