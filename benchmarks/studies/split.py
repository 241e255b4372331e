"""Four workers that all do everything, and four of two roles."""

from __future__ import annotations

from benchmarks.studies.study import Found, Study, Value, Variant
from benchmarks.studies.words import ms, per_cent

COLOCATED, STRICT, MIXED = "colocated (4)", "split (2P2D), strict", "split (2P2D), mixed pool"
_RATES = (8, 16, 20, 24)


def _says(found: Found) -> str:
    few = {variant: found[variant, "16"] for variant in (COLOCATED, STRICT, MIXED)}
    many = {variant: found[variant, "24"] for variant in (COLOCATED, STRICT, MIXED)}
    return (
        f"At 24 requests a second a strict split has reached what two prefill workers compute, and keeps the targets "
        f"of {per_cent(many[STRICT]['kept_share'])} of the requests; colocated workers keep those of "
        f"{per_cent(many[COLOCATED]['kept_share'])}, and a split with a mixed pool those of "
        f"{per_cent(many[MIXED]['kept_share'])}: a fixed cut fits one load. "
        "What a split buys is that prompts disturb no step of decode; but the shipped scheduler cuts the chunks beside "
        f"those who generate to the time that they want, so there is little to buy here: a TPOT p99 of "
        f"{ms(few[STRICT]['tpot_p99_s'])} split and of {ms(few[COLOCATED]['tpot_p99_s'])} colocated at sixteen a "
        "second. "
        f"Colocated workers also have twice as many batches, each of half the size, and no handoff "
        f"({ms(few[STRICT]['handoff_p50_s'])}); what speaks for a split, a pool that is sized and a card that is "
        "chosen for one task, no simulation of four equal cards shows."
    )


STUDY = Study(
    name="split",
    title="Colocated and split",
    scenario="four_cards.yaml",
    setting="requests a second",
    values=[Value(str(rate), {"load": {"rate": rate}}) for rate in _RATES],
    variants=[
        Variant(COLOCATED, {"prefill": {"workers": 0}, "decode": {"workers": 4}}),
        Variant(STRICT, {"tandem": {"scheduling": {"mixed_pool": False}}}),
        Variant(MIXED),
    ],
    columns=("tokens_per_s", "ttft_p50_s", "ttft_p99_s", "tpot_p50_s", "tpot_p99_s", "kept_share", "kept_per_s"),
    panels=("kept_per_s", "tpot_p99_s"),
    says=_says,
)
