"""Decode workers that compute prompts where they have time for them, and such that do not."""

from __future__ import annotations

from benchmarks.studies.study import Found, Study, Value, Variant
from benchmarks.studies.words import ms, per_cent

ON, OFF = "mixed pool on", "mixed pool off"
_CUTS = ((1, 3), (2, 2), (3, 1))
_RATE = 16


def _says(found: Found) -> str:
    (few_on, few_off), (even_on, even_off), (many_on, many_off) = (
        (found[ON, f"{p}P{d}D"], found[OFF, f"{p}P{d}D"]) for p, d in _CUTS
    )
    return (
        f"One prefill worker beside three of decode has more prompts than it computes: half of the first tokens take "
        f"more than {few_off['ttft_p50_s']:.1f} s, and {ms(few_on['ttft_p50_s'])} where decode helps, which then "
        f"computes {per_cent(few_on['by_decode_share'])} of the prompts. "
        f"With two of each nobody is short, and decode still takes {per_cent(even_on['by_decode_share'])}, those that "
        f"would wait behind long ones: the p99 of TTFT is {ms(even_on['ttft_p99_s'])} instead of "
        f"{ms(even_off['ttft_p99_s'])}, that of TPOT {ms(even_on['tpot_p99_s'])} and {ms(even_off['tpot_p99_s'])}. "
        f"With three of prefill decode is what is short, and it takes {per_cent(many_on['by_decode_share'])} of the "
        f"prompts: {per_cent(many_on['kept_share'])} of the requests keep their targets with the mixed pool and "
        f"{per_cent(many_off['kept_share'])} without, since it helps decode in nothing."
    )


STUDY = Study(
    name="mixed_pool",
    title="The mixed pool",
    scenario="four_cards.yaml",
    setting="workers",
    values=[Value(f"{p}P{d}D", {"prefill": {"workers": p}, "decode": {"workers": d}}) for p, d in _CUTS],
    variants=[Variant(OFF, {"tandem": {"scheduling": {"mixed_pool": False}}}), Variant(ON)],
    columns=("tokens_per_s", "ttft_p50_s", "ttft_p99_s", "tpot_p50_s", "tpot_p99_s", "kept_share", "by_decode_share"),
    panels=("ttft_p99_s", "tpot_p99_s", "kept_share"),
    says=_says,
)
