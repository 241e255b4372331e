"""Whether the parts that a router names of a request's time add up to what its client waited.

    sent ── opened, written ── came to the router ── read, … decode, send ── came to the client ── read
         own_s of the record   └──────────────── what the router tells ────────┘               own_s

What the load generator takes for itself is named by it, and no part of the request's time.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from tandem.bench.load.http_client import LoadClient
from tandem.bench.load.records import RequestRecord
from tandem.core.errors import TandemError
from tandem.core.socket_wait import TICK_S

#: A router remembers so many requests.
_REMEMBERED = 1000
_FORGOTTEN = 404
#: The named parts add up to within so much of the time between begin and end.
_SUM = 0.01
#: So much of a request's time may have no name,
_UNNAMED = 0.02
#: or so much: when something came to either end is known within a tick.
_UNNAMED_S = 2 * TICK_S


@dataclass(frozen=True, slots=True)
class Waterfalls:
    """Of requests whose parts are known: shares of the time that their client waited, without what was its own."""

    num: int
    median_unnamed: float  # no named part
    worst_unnamed: float


async def waterfalls(url: str, records: Sequence[RequestRecord]) -> Waterfalls:
    """Asks the router at `url` for the newest of `records`, which have succeeded. Raises as `judged`."""
    return judged(await parts_of(url, records))


async def parts_of(url: str, records: Sequence[RequestRecord]) -> list[tuple[float, dict[str, Any]]]:
    """Of the newest of `records` the seconds that the client waited, and what the router at `url` tells of each."""
    newest = sorted(records, key=lambda record: record.ended_s)[-_REMEMBERED:]
    client = LoadClient(url, max_sockets=1)
    try:
        asked = [(record, await client.ask("GET", f"/v1/requests/{record.request_id}")) for record in newest]
    finally:
        client.close()
    return [
        (record.ended_s - record.sent_s - record.own_s, json.loads(told.body)["data"][0])
        for record, told in asked
        if told.status != _FORGOTTEN  # those that came first, which need not be those that ended first
    ]


def judged(requests: Iterable[tuple[float, dict[str, Any]]]) -> Waterfalls:
    """Of each request the seconds that its client waited, and what the router tells of it.

    More than the client waited is no fault: a router may lose its core right after it has written an answer's end.

    Raises:
        TandemError: the parts of one have gaps or do not add up, or more than 2 % of its time has no name.
    """
    unnamed = []
    for waited_s, told in requests:
        spans, age_s = told["spans"], told["age_s"]
        has_gap = spans[0]["begin_s"] != 0.0 or any(a["end_s"] != b["begin_s"] for a, b in pairwise(spans))
        if has_gap or abs(spans[-1]["end_s"] - age_s) > _SUM * age_s:
            raise TandemError(f"the parts of request {told['id']} do not add up to its {age_s:.3f} s: {spans}")
        if waited_s - age_s > max(_UNNAMED * waited_s, _UNNAMED_S):
            raise TandemError(
                f"of the {waited_s:.3f} s of request {told['id']} no part names {waited_s - age_s:.3f} s: {spans}"
            )
        unnamed.append(abs(waited_s - age_s) / waited_s)
    unnamed.sort()
    return Waterfalls(len(unnamed), unnamed[len(unnamed) // 2], unnamed[-1])
