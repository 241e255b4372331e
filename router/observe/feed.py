"""What the live page is told each second: by one router, and by all of a cluster together. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from router.observe.recorder import Recorder

MAX_RUNNING = 200
MAX_ENDED = 100


@dataclass(frozen=True, slots=True)
class Seen:
    """What a watcher has been told of one router: everything before this second, and so many ended requests.

    Seconds are numbered since the epoch.
    """

    second: int = 0
    num_ended: int = 0

    @staticmethod
    def of(part: Mapping[str, Any]) -> Seen:
        return Seen(part["now"], part["num_ended"])


#: What a part holds, and of which kind each is.
_PART: Mapping[str, type] = {
    "router": str, "now": int, "num_running": int, "num_ended": int, "seconds": dict, "running": list, "ended": list,
}  # fmt: skip


def read_part(text: bytes) -> dict[str, Any]:
    """What `part_of` made in another router. Raises `ValueError` for what is no part."""
    part = orjson.loads(text)
    if not isinstance(part, dict) or not all(isinstance(part.get(key), kind) for key, kind in _PART.items()):
        raise ValueError("this is no part of a live page")
    return part


def part_of(recorder: Recorder, router: str, seen: Seen, now_s: float, until: int | None = None) -> dict[str, Any]:
    """What one router has to tell to whom `seen` was told before.

    `until`: the first second that is not told; `None`: the present one. Who adds several routers up asks all for the
    same seconds: one that only some have told would be over when the others tell it.
    """
    if until is None:
        until = recorder.history.second(now_s)
    # Fewer ends than it has told of: it was another life of this router that told.
    num_told = seen.num_ended if seen.num_ended <= recorder.num_ended else 0
    new = min(recorder.num_ended - num_told, MAX_ENDED)
    return {
        "router": router,
        "now": until,
        "num_running": recorder.num_running,
        "num_ended": recorder.num_ended,
        "seconds": {s.second: s.describe() for s in recorder.history.since(seen.second, until)},
        "running": [_row(trace.summary(now_s), router) for trace in recorder.oldest_running(MAX_RUNNING)],
        "ended": [_row(trace.summary(now_s), router) for trace in recorder.last_ended(new)],
    }


def _row(summary: dict[str, Any], router: str) -> dict[str, Any]:
    return {**summary, "router": router}


def joined(parts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """What all of them tell; seconds that several counted are added up. JSON has made texts of their numbers."""
    seconds: dict[int, dict[str, Any]] = {}
    running: list[Any] = []
    ended: list[Any] = []
    routers = []
    for part in parts:
        routers.append({key: part[key] for key in ("router", "num_running", "num_ended")})
        running += part["running"]
        ended += part["ended"]
        for number, second in part["seconds"].items():
            known = seconds.get(int(number))
            seconds[int(number)] = _added(known, second) if known else second
    routers.sort(key=lambda router: router["router"])
    running.sort(key=lambda row: -row["age_s"])
    return {
        "routers": routers,
        "seconds": [{"second": number, **seconds[number]} for number in sorted(seconds)],
        "running": running[:MAX_RUNNING],
        "ended": ended,
    }


def _added(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: value + other[key] if isinstance(value, int) else dict(Counter(value) + Counter(other[key]))
        for key, value in one.items()
    }
