"""A prefill worker whose way out is slow, and what it is worth that routers hear of it."""

from __future__ import annotations

from benchmarks.studies.study import Found, Study, Value, Variant
from benchmarks.studies.words import ms, per_cent

TOLD, BLIND = "routers hear of it", "routers do not (to compare)"
_SHARES = (1.0, 0.5, 0.25, 0.1, 0.05)


def _says(found: Found) -> str:
    whole, told, blind = found[TOLD, "100 %"], found[TOLD, "10 %"], found[BLIND, "10 %"]
    return (
        "Prefill workers tell how fast their handoffs went, and a prompt goes where its pages are soonest at decode, "
        "also if others wait there. "
        f"With a tenth of the bandwidth behind one of four, the p99 of the longest gap, which is the handoff's, is "
        f"{ms(told['gap_p99_s'])}, and {ms(blind['gap_p99_s'])} where nobody is told ({ms(whole['gap_p99_s'])} when "
        f"all are whole); {per_cent(told['kept_share'])} of the requests keep their targets instead of "
        f"{per_cent(blind['kept_share'])}. "
        "What is left is how it is learnt: those who are under way when it becomes slow, and one every thirty seconds, "
        "since a way that has not been used for so long is tried again."
    )


STUDY = Study(
    name="slow_link",
    title="A link at 10 %",
    scenario="slow_link.yaml",
    setting="left of one link",
    values=[Value(f"{share * 100:g} %", {"faults": [f"prefill-0@10={share:g}"]}) for share in _SHARES],
    variants=[Variant(BLIND, {"network": {"tells_links": False}}), Variant(TOLD)],
    columns=("tokens_per_s", "ttft_p50_s", "ttft_p99_s", "gap_p99_s", "handoff_p50_s", "handoff_p99_s", "kept_share"),
    panels=("gap_p99_s", "handoff_p99_s"),
    says=_says,
)
