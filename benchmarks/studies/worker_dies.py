"""A worker that dies, and what its requests and the others see of it."""

from __future__ import annotations

from benchmarks.studies.study import Found, Study, Value, Variant
from benchmarks.studies.words import ms, per_cent

NOBODY, DECODE, PREFILL = "nobody dies", "a decode worker dies", "a prefill worker dies"
_WHEN = "20 s"


def _says(found: Found) -> str:
    nobody, decode, prefill = (found[variant, _WHEN] for variant in (NOBODY, DECODE, PREFILL))
    return (
        "When one of two decode workers dies, its requests go on at the other, whose memory is full soon: who comes "
        f"then waits for room (the p99 of TTFT goes from {ms(nobody['ttft_p99_s'])} to {ms(decode['ttft_p99_s'])}), "
        f"one request in a hundred waits for {ms(decode['gap_p99_s'])} or more between two tokens, and "
        f"{per_cent(decode['kept_share'])} keep their targets instead of {per_cent(nobody['kept_share'])}; none is "
        "lost, and none gets a token twice. "
        f"When one of two prefill workers dies, decode computes {per_cent(prefill['by_decode_share'])} of the prompts "
        f"instead of {per_cent(nobody['by_decode_share'])}, and the p99 of TTFT goes from {ms(nobody['ttft_p99_s'])} "
        f"to {ms(prefill['ttft_p99_s'])}. "
        "The one that is started in its place serves from the fortieth second on, and takes what has piled up."
    )


STUDY = Study(
    name="worker_dies",
    title="A worker dies",
    scenario="worker_dies.yaml",
    setting="at",
    values=[Value(_WHEN)],
    variants=[
        Variant(NOBODY, {"faults": []}),
        Variant(PREFILL, {"faults": ["prefill-0@20"]}),
        Variant(DECODE),
    ],
    columns=("tokens_per_s", "ttft_p50_s", "ttft_p99_s", "tpot_p99_s", "gap_p99_s", "kept_share", "by_decode_share"),
    panels=("tokens_per_s", "num_under_way"),
    says=_says,
    over_time=True,
)
