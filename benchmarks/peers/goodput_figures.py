"""What the searches for goodput of two servers say beside each other. Pure."""

from __future__ import annotations

from benchmarks.peers.figures import Goal, Run, judged
from benchmarks.peers.origin import are_together, hours
from tandem.bench.repetitions import spread


def open_end(search: Run) -> str:
    """Of a search that met no rate at which the server failed."""
    return "≥ " if search["failed_from_per_s"] is None else ""


def goodput_ratio(search: Run, base: Run) -> float | None:
    """`None`: the base kept no rate, the searches lie too far apart, or neither met a rate that was too high."""
    if not base["goodput_per_s"] or not are_together(search, base) or (open_end(search) and open_end(base)):
        return None
    return float((search["goodput_per_s"] or 0.0) / base["goodput_per_s"])


def goodput_ratio_words(search: Run, base: Run, goal: Goal | None) -> tuple[str, str]:
    """The ratio, and how it stands to the goal; a bound of it decides only in its own direction."""
    ratio = goodput_ratio(search, base)
    if ratio is None:
        if not base["goodput_per_s"]:
            return "", ""
        return ("unknown" if are_together(search, base) else f"more than {hours()} apart"), ""
    signs = open_end(search), open_end(base)
    text = f"≥ {ratio:.2f}" if signs[0] else f"≤ {ratio:.2f}" if signs[1] else f"{ratio:.2f}"
    if goal is None:
        return text, ""
    if any(signs) and goal.is_reached_by(ratio) != bool(signs[0]):
        return text, f"{goal}: undecided"
    return text, judged(spread([ratio]), goal)
