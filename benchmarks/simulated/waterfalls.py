"""Whether the parts that a router names of a request's time add up to what its client waited."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from tandem.bench.load.http_client import LoadClient
from tandem.bench.load.records import RequestRecord
from tandem.core.errors import TandemError

#: A router remembers so many requests.
_REMEMBERED = 1000
#: The named parts add up to within so much of the time between begin and end.
_SUM = 0.01


@dataclass(frozen=True, slots=True)
class Waterfalls:
    """Of requests whose parts are known: shares of the time that their client waited."""

    num: int
    median_unnamed: float  # no named part
    worst_unnamed: float
    num_above: int  # those with more than 2 %


async def waterfalls(url: str, records: Sequence[RequestRecord]) -> Waterfalls:
    """Asks the router at `url` for the newest of `records`, which have succeeded.

    Raises:
        TandemError: a request is not known, or its parts have gaps or do not add up.
    """
    newest = sorted(records, key=lambda record: record.ended_s)[-_REMEMBERED:]
    client = LoadClient(url, max_sockets=1)
    try:
        told = [(await client.ask("GET", f"/v1/requests/{record.request_id}")).body for record in newest]
    finally:
        client.close()
    pairs = zip(newest, (json.loads(body) for body in told), strict=True)
    return judged((record.ended_s - record.sent_s, answer["data"][0]) for record, answer in pairs)


def judged(requests: Iterable[tuple[float, dict[str, Any]]]) -> Waterfalls:
    """Of each request the seconds that its client waited, and what the router tells of it. Raises `TandemError`."""
    unnamed = []
    for waited_s, told in requests:
        spans, age_s = told["spans"], told["age_s"]
        has_gap = spans[0]["begin_s"] != 0.0 or any(a["end_s"] != b["begin_s"] for a, b in pairwise(spans))
        if has_gap or abs(spans[-1]["end_s"] - age_s) > _SUM * age_s:
            raise TandemError(f"the parts of request {told['id']} do not add up to its {age_s:.3f} s: {spans}")
        unnamed.append(abs(waited_s - age_s) / waited_s)
    unnamed.sort()
    return Waterfalls(len(unnamed), unnamed[len(unnamed) // 2], unnamed[-1], sum(share > 0.02 for share in unnamed))
