"""`tandem trace ID`: where the time of one request went."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tandem.cluster.watch.face import Face, escaped
from tandem.cluster.watch.figures import duration

_WIDTH = 50  # characters of the whole time


def trace(face: Face, request_id: str, *, as_json: bool) -> int:
    """Print it. Raises `ConfigError` where no router remembers it."""
    told = face.read(f"/v1/requests/{escaped(request_id)}")["data"]
    if as_json:
        print(json.dumps(told, indent=2))
        return 0
    console = Console()
    for request in told:
        console.print(_head(request))
        console.print(waterfall(request))
        for attempt in request["attempts"]:
            console.print(_attempt(attempt))
        if request["error"]:
            console.print(Text(request["error"], style="red"))
    return 0


def _head(request: Mapping[str, Any]) -> Text:
    cached = f" ({request['cached_tokens']:,} cached)" if request["cached_tokens"] else ""
    return Text(
        f"{request['id']}: {request['state']}, {duration(request['age_s'])}; {request['prompt_tokens']:,} prompt tokens"
        f"{cached}, {request['output_tokens']:,} output tokens, the first after {duration(request['ttft_s'])}; "
        f"{request['router']}"
    )


def waterfall(request: Mapping[str, Any]) -> Table:
    """One line for each part."""
    whole_s = max(request["age_s"], 1e-9)
    table = Table("part", "time", "share", "", box=None)
    for column in table.columns[1:3]:
        column.justify = "right"
    for span in request["spans"]:
        again = f" (attempt {span['attempt']})" if span["attempt"] > 1 else ""
        seconds = span["end_s"] - span["begin_s"]
        begin = min(_WIDTH - 1, round(_WIDTH * span["begin_s"] / whole_s))
        bar = " " * begin + "█" * max(1, min(_WIDTH - begin, round(_WIDTH * seconds / whole_s)))
        table.add_row(span["name"] + again, duration(seconds), f"{seconds / whole_s:.1%}", Text(bar))
    for (worker, name), parts in _kinds(request["work"]).items():
        seconds = sum(part["end_s"] - part["begin_s"] for part in parts)
        many = f" × {len(parts)}" if len(parts) > 1 else ""
        table.add_row(f"  {worker}: {name}{many}", duration(seconds), "", Text(_bars(parts, whole_s), style="dim"))
    return table


def _kinds(work: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str], list[Mapping[str, Any]]]:
    """What workers did, by worker and name, in order."""
    found: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for part in work:
        found.setdefault((part["worker"], part["name"]), []).append(part)
    return found


def _bars(parts: Sequence[Mapping[str, Any]], whole_s: float) -> str:
    """Parts that may overlap, on one line."""
    line = [" "] * _WIDTH
    for part in parts:
        begin = min(_WIDTH - 1, int(_WIDTH * part["begin_s"] / whole_s))
        end = min(_WIDTH, max(begin + 1, round(_WIDTH * part["end_s"] / whole_s)))
        line[begin:end] = "▒" * (end - begin)
    return "".join(line).rstrip()


def _attempt(attempt: Mapping[str, Any]) -> Text:
    way = f"{attempt['prefill']} → {attempt['decode']}" if attempt["prefill"] else f"{attempt['decode']} alone"
    end = f"; ended as {attempt['ended']}" if attempt["ended"] else ""
    return Text(f"attempt {attempt['number']} at {duration(attempt['began_s'])}: {way} ({attempt['why']}){end}")
