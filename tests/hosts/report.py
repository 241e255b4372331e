"""What was seen of faults of hosts and networks: as JSON, and as the table in docs/failure-contract.md.

python -m tests.hosts.report     writes the table anew, from docs/figures/host_faults.json
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.hosts.environment import ROOT

FIGURES = ROOT / "docs" / "figures" / "host_faults.json"
PAGE = ROOT / "docs" / "failure-contract.md"
SAME = "the same tokens"
"""What a client saw that saw nothing of a fault, but time."""
_BETWEEN = re.compile(r"(<!-- host faults: made by tests.hosts.report -->\n).*?(<!-- end -->)", re.DOTALL)


@dataclass(frozen=True)
class Seen:
    """One fault, and what became of the requests under way.

    Attributes:
        fault: in words.
        saw: what clients saw, and how many of them.
        recovery_s: the longest that a client waited for a token, or its end, from the fault on.
        whole_s: from the end of the fault until all workers served.
        idle_s: from then until nothing was held for any request, in quarantine neither.
        replaced: how many workers live another life than before.
        afterwards: what clients saw that came when all was over; empty where none was asked for.
        afterwards_s: the longest that one of these waited for a token.
    """

    fault: str
    saw: dict[str, int]
    recovery_s: float
    whole_s: float
    idle_s: float
    replaced: int
    afterwards: dict[str, int] = field(default_factory=dict)
    afterwards_s: float | None = None


def save(target: Path, seen: list[Seen]) -> None:
    """Those of this run, in place of earlier ones of the same faults."""
    before = json.loads(target.read_text())["faults"] if target.exists() else []
    faults = {fault["fault"]: fault for fault in [*before, *map(asdict, seen)]}
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps({"faults": list(faults.values())}, indent=1) + "\n")


def table(faults: list[dict[str, Any]]) -> str:
    """One line a fault."""
    lines = [
        "| fault | requests | longest wait, s | all serve again, s | nothing held, s | workers replaced "
        "| afterwards, s |",
        "|---|---|---|---|---|---|---|",
    ]
    for fault in faults:
        saw = ", ".join(f"{number} × {what}" for what, number in sorted(fault["saw"].items()))
        times = " | ".join(f"{fault[name]:.1f}" for name in ("recovery_s", "whole_s", "idle_s"))
        lines.append(f"| {fault['fault']} | {saw} | {times} | {fault['replaced']} | {_afterwards(fault)} |")
    return "\n".join(lines)


def _afterwards(fault: dict[str, Any]) -> str:
    if not fault.get("afterwards"):
        return "-"
    errors = [f", {number} × {what}" for what, number in sorted(fault["afterwards"].items()) if what != SAME]
    return f"{fault['afterwards_s']:.1f}{''.join(errors)}"


def page() -> str:
    """The page with the table of the figures."""
    faults = json.loads(FIGURES.read_text())["faults"]
    return _BETWEEN.sub(lambda found: f"{found[1]}{table(faults)}\n{found[2]}", PAGE.read_text())


if __name__ == "__main__":
    PAGE.write_text(page())
