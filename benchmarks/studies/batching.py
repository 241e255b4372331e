"""Batches that are made once, and batches that each step may change."""

from __future__ import annotations

from benchmarks.studies.schedulers import StaticScheduler
from benchmarks.studies.study import Found, Study, Value, Variant
from benchmarks.studies.words import ms

STATIC, CONTINUOUS = "static batches (ours to compare)", "continuous batches"
_RATES = (2, 8, 16, 32)


def _says(found: Found) -> str:
    static, continuous = (found[variant, "32"] for variant in (STATIC, CONTINUOUS))
    few, many = found[STATIC, "2"], found[CONTINUOUS, "16"]
    return (
        f"Where more comes than can be served, continuous batches give {continuous['tokens_per_s']:,.0f} tokens a "
        f"second and static ones {static['tokens_per_s']:,.0f}: a static batch shrinks to its longest answer, "
        f"{static['num_running']:.0f} sequences on average of the 64 that have a place, and a step of few costs nearly "
        "as much as a step of many, since both read all weights. "
        f"Who comes meanwhile waits for that longest answer, so that half of the first tokens take more than "
        f"{few['ttft_p50_s']:.1f} s at two requests a second already; continuous batches still have "
        f"{ms(many['ttft_p50_s'])} at sixteen. "
        "The static ones are kinder here than they were in any server: answers are given out as they are generated, "
        "and one that has ended costs its batch nothing more."
    )


STUDY = Study(
    name="batching",
    title="Static and continuous batches",
    scenario="one_card.yaml",
    setting="requests a second",
    values=[Value(str(rate), {"load": {"rate": rate}}) for rate in _RATES],
    variants=[Variant(STATIC, make_scheduler=StaticScheduler), Variant(CONTINUOUS)],
    columns=("tokens_per_s", "ttft_p50_s", "ttft_p99_s", "tpot_p50_s", "kept_per_s", "num_running"),
    panels=("tokens_per_s", "ttft_p50_s"),
    says=_says,
)
