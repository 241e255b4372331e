"""`tandem top`: the workers and the requests of a cluster, renewed each second, in a terminal."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from tandem.cluster.watch.face import Face
from tandem.cluster.watch.figures import Window, duration, sparkline
from tandem.core.errors import NotRunningError

_OTHER_LINES = 9  # of the screen, beside workers and requests
_BAD = frozenset({"failed", "silent"})


def top(face: Face, *, once: bool) -> int:
    """Until Ctrl-C, or until the router leaves; `once`: print what is, and return."""
    window, console = Window(), Console()
    if once or not sys.stdout.isatty():
        for state in face.events():
            window.add(state)
            console.print(screen(state, window, console.height if sys.stdout.isatty() else 100))
            return 0
        raise _left(face)
    try:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            for state in face.events():
                window.add(state)
                live.update(screen(state, window, console.height), refresh=True)
    except KeyboardInterrupt:
        return 0
    raise _left(face)


def _left(face: Face) -> NotRunningError:
    return NotRunningError(f"the router at {face.url} has left; call this again to see the next one")


def screen(state: Mapping[str, Any], window: Window, height: int) -> RenderableType:
    """All of it, in at most `height` lines."""
    cluster = state["cluster"]
    workers = [(role, worker) for role in ("prefill", "decode") for worker in cluster[role]]
    num_workers = min(len(workers), max(2, (height - _OTHER_LINES) // 2))
    num_requests = max(1, height - _OTHER_LINES - num_workers)
    return Group(
        _summary(state, window),
        _workers(workers[:num_workers], sum(cluster["num_workers"].values()) - num_workers),
        _requests(state["running"], num_requests),
    )


def _summary(state: Mapping[str, Any], window: Window) -> Text:
    num_running = sum(router["num_running"] for router in state["routers"])
    ended = window.outcomes
    failed = ended.total() - ended["finished"]
    text = Text(f"Tandem {state['cluster']['model']}: {num_running} requests under way, {ended['finished']} finished")
    if failed:
        text.append(f", {failed} not finished", style="red")
    text.append(" in a minute")
    text.append(f"\n{window.rate('tokens', 5):9,.0f} tokens/s  {sparkline([s['tokens'] for s in window.seconds])}")
    for name, label in (("ttft", "first token"), ("itl", "between tokens")):
        halves = [f"p{round(share * 100)} {duration(window.quantile(name, share))}" for share in (0.5, 0.99)]
        text.append(f"\n{label}: {', '.join(halves)}")
    return text


def _workers(workers: list[tuple[str, Mapping[str, Any]]], num_more: int) -> Table:
    table = Table("worker", "state", "running", "queued", "pages", "free", "cached", "quarantined", box=None)
    for _, worker in workers:
        pages = worker["pages"]
        state = Text(worker["state"], style="red" if worker["state"] in _BAD else "")
        row = (worker["num_running"], worker["num_queued"], sum(pages.values()), pages["free"], pages["cached"])
        quarantined = Text(f"{pages['quarantined']:,}", style="red" if pages["quarantined"] else "")
        table.add_row(worker["id"], state, *(f"{value:,}" for value in row), quarantined)
    if num_more:
        table.add_row(f"and {num_more} more")
    return table


def _requests(running: list[Mapping[str, Any]], most: int) -> Table:
    table = Table("request", "state", "age", "first token", "prompt", "output", "prefill", "decode", "try", box=None)
    for row in running[:most]:
        counts = (f"{row['prompt_tokens']:,}", f"{row['output_tokens']:,}")
        route = (row["prefill"] or "-", row["decode"] or "-", str(row["attempt"] or "-"))
        name = Text(row["id"], overflow="ellipsis", no_wrap=True)
        table.add_row(name, row["state"], duration(row["age_s"]), duration(row["ttft_s"]), *counts, *route)
    return table
