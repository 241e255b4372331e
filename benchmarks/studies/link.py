"""What a prefill worker's network carries."""

from __future__ import annotations

from benchmarks.studies.study import Found, Study, Value, Variant
from benchmarks.studies.words import ms, per_cent

SPLIT, MIXED = "split (2P2D), strict", "split (2P2D), mixed pool"
_RATES = (1, 2, 4, 8, 25)


def _says(found: Found) -> str:
    slow, even, fast = (found[SPLIT, rate] for rate in ("1", "4", "25"))
    helped = found[MIXED, "1"]
    return (
        "A token of this model has 131 kB of KV, and a busy prefill worker computes more than ten thousand of them a "
        "second, which is more than a GB. "
        "A link that carries that hides nearly all of a handoff behind its prompt's computation, but for the last "
        f"chunk: half of the handoffs take less than {ms(fast['handoff_p50_s'])} at 25 GB/s and "
        f"{ms(even['handoff_p50_s'])} at 4, and the cluster serves as many tokens. "
        f"At 1 GB/s prompts wait for the link, and {slow['tokens_per_s']:,.0f} tokens a second are left of "
        f"{fast['tokens_per_s']:,.0f}; with the mixed pool, which sends nothing for "
        f"{per_cent(helped['by_decode_share'])} of the requests, {helped['tokens_per_s']:,.0f} are."
    )


STUDY = Study(
    name="link",
    title="Link bandwidth",
    scenario="long_prompts.yaml",
    setting="GB/s out of a prefill worker",
    values=[Value(f"{rate:g}", {"network": {"gb_per_s": rate}}) for rate in _RATES],
    variants=[Variant(SPLIT, {"tandem": {"scheduling": {"mixed_pool": False}}}), Variant(MIXED)],
    columns=("tokens_per_s", "ttft_p50_s", "gap_p99_s", "handoff_p50_s", "handoff_p99_s", "by_decode_share"),
    panels=("tokens_per_s", "handoff_p50_s"),
    says=_says,
)
