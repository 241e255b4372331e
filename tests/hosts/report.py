"""What was seen of faults of hosts and networks: as JSON, and as the table in docs/failure-contract.md.

python -m tests.hosts.report docs/figures/host_faults.json     prints the table
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


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
    """

    fault: str
    saw: dict[str, int]
    recovery_s: float
    whole_s: float
    idle_s: float
    replaced: int


def save(target: Path, seen: list[Seen]) -> None:
    """Those of this run, in place of earlier ones of the same faults."""
    before = json.loads(target.read_text())["faults"] if target.exists() else []
    faults = {fault["fault"]: fault for fault in [*before, *map(asdict, seen)]}
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps({"faults": list(faults.values())}, indent=1) + "\n")


def table(faults: list[dict[str, Any]]) -> str:
    """One line a fault."""
    lines = [
        "| fault | requests | longest wait, s | all serve again, s | nothing held, s | workers replaced |",
        "|---|---|---|---|---|---|",
    ]
    for fault in faults:
        saw = ", ".join(f"{number} × {what}" for what, number in sorted(Counter(fault["saw"]).items()))
        times = " | ".join(f"{fault[name]:.1f}" for name in ("recovery_s", "whole_s", "idle_s"))
        lines.append(f"| {fault['fault']} | {saw} | {times} | {fault['replaced']} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(json.loads(Path(sys.argv[1]).read_text())["faults"]))
