"""What it costs that several routers place requests, each by what it knows."""

from __future__ import annotations

from benchmarks.studies.study import Found, Study, Value, Variant
from benchmarks.studies.words import ms, per_cent

STEADY, RUSH = "10 conversations a second", "250 users begin at once"
_NUMBERS = (1, 2, 4, 8)


def _says(found: Found) -> str:
    one, *_, eight = each = [found[STEADY, str(number)] for number in _NUMBERS]
    p99s = sorted(point["ttft_p99_s"] for point in each)
    alone, *_, many = (found[RUSH, str(number)] for number in _NUMBERS)
    return (
        "Workers tell all routers of each request that comes or goes, and of workers that are equally good each router "
        "begins with another one. So placement hardly suffers by being divided: the median of TTFT is "
        f"{ms(one['ttft_p50_s'])} with one router and {ms(eight['ttft_p50_s'])} with eight, and "
        f"{per_cent(one['cached_share'])} and {per_cent(eight['cached_share'])} of the tokens of prompts are found in "
        "caches. (One router takes the first by name of those that are equally good, so its first prefill workers get "
        "most of the prompts, and its last ones hardly any.) "
        f"The p99 of TTFT goes up and down, between {ms(p99s[0])} and {ms(p99s[-1])}. "
        "Where more come at once than are computed, requests wait in several queues instead of one, and each router "
        f"places its share: the p99 of TTFT is {ms(alone['ttft_p99_s'])} with one and {ms(many['ttft_p99_s'])} with "
        f"eight, and {per_cent(alone['kept_share'])} and {per_cent(many['kept_share'])} of the requests keep their "
        "targets."
    )


STUDY = Study(
    name="several_routers",
    title="Several routers",
    scenario="several_routers.yaml",
    setting="routers",
    values=[Value(str(number), {"tandem": {"pools": {"routers": number}}}) for number in _NUMBERS],
    variants=[
        Variant(STEADY),
        Variant(RUSH, {"load": {"conversations": 700, "concurrency": 250, "think_time_s": 2}}),
    ],
    columns=("tokens_per_s", "ttft_p50_s", "ttft_p99_s", "tpot_p99_s", "cached_share", "kept_share"),
    panels=("ttft_p50_s", "ttft_p99_s", "cached_share"),
    says=_says,
)
