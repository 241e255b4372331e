"""Tokens of one prompt in a step."""

from __future__ import annotations

from benchmarks.studies.study import Found, Study, Value, Variant
from benchmarks.studies.words import ms

SPLIT, COLOCATED = "split (2P2D)", "colocated (4)"
_SIZES = (64, 256, 512, 1024, 4096)


def _says(found: Found) -> str:
    small, usual, large = (found[SPLIT, str(size)] for size in (64, 512, 4096))
    beside, beside_large = (found[COLOCATED, str(size)] for size in (512, 4096))
    return (
        f"Small chunks read all weights for a few tokens each: half of the first tokens take more than "
        f"{ms(small['ttft_p50_s'])} with chunks of 64, {ms(usual['ttft_p50_s'])} with the default's 512, and "
        f"{ms(large['ttft_p50_s'])} with 4,096. "
        f"In a split cluster a large chunk delays its handoff, as the pages of a chunk leave when it is computed: "
        f"{ms(usual['handoff_p50_s'])} at 512 and {ms(large['handoff_p50_s'])} at 4,096, while no step of decode is "
        "longer for it. "
        f"Where workers are colocated the chunk is in a step of those who generate: the p99 of their longest gap is "
        f"{ms(beside['gap_p99_s'])} at 512 and {ms(beside_large['gap_p99_s'])} at 4,096, though the shipped scheduler "
        "cuts chunks to the time that is wanted of a token."
    )


STUDY = Study(
    name="chunk_size",
    title="Chunk size",
    scenario="long_prompts.yaml",
    setting="tokens of a chunk",
    values=[
        Value(str(size), {"tandem": {"scheduling": {"chunk_size": size, "max_num_batched_tokens": max(2048, size)}}})
        for size in _SIZES
    ],
    variants=[
        Variant(SPLIT, {"tandem": {"scheduling": {"mixed_pool": False}}}),
        Variant(COLOCATED, {"prefill": {"workers": 0}, "decode": {"workers": 4}}),
    ],
    columns=("tokens_per_s", "ttft_p50_s", "ttft_p99_s", "tpot_p50_s", "tpot_p99_s", "gap_p99_s", "handoff_p50_s"),
    panels=("ttft_p50_s", "gap_p99_s"),
    says=_says,
)
