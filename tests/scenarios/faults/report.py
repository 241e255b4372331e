"""The figures of the kill matrix: as JSON, and as a table.

python -m tests.scenarios.faults.report docs/figures/kill_matrix.json
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from tests.scenarios.faults.cases import Case


def record(request: pytest.FixtureRequest, case: Case, **seen: Any) -> None:
    """Keep what was seen of `case` with the report of the running test; times in seconds."""
    request.node.user_properties += [("case", asdict(case)), *seen.items()]


def write(target: Path, reports: Iterable[pytest.TestReport]) -> None:
    """All cases of a run, and the sums."""
    cases = []
    for report in reports:
        seen = dict(report.user_properties)
        cases.append({**seen.pop("case"), **seen, "passed": report.passed})
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps({"summary": summary(cases), "cases": cases}, indent=1) + "\n")


def summary(cases: list[dict[str, Any]]) -> dict[str, Any]:
    """Counts, and the recovery times (fault to next token at the client) by signal."""
    times = {
        signal: sorted(c["recovery_s"] for c in cases if c["signal"] == signal and c.get("recovery_s") is not None)
        for signal in ("kill", "stop")
    }
    return {
        "cases": len(cases),
        "passed": sum(case["passed"] for case in cases),
        "failed": sum(not case["passed"] for case in cases),
        "recovery_s": {
            signal: {"median": round(statistics.median(found), 3), "slowest": round(found[-1], 3)}
            for signal, found in times.items()
            if found
        },
    }


def table(cases: list[dict[str, Any]]) -> str:
    """One line for each point and signal: passed of all, median and slowest recovery, what the clients saw."""
    lines = ["| point | signal | passed | median s | slowest s | clients saw |", "|---|---|---|---|---|---|"]
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for case in cases:
        groups.setdefault((case["point"], case["signal"]), []).append(case)
    for (point, signal), group in groups.items():
        times = sorted(case["recovery_s"] for case in group if case.get("recovery_s") is not None)
        median, slowest = (f"{statistics.median(times):.2f}", f"{times[-1]:.2f}") if times else ("-", "-")
        passed = sum(case["passed"] for case in group)
        saw = ", ".join(sorted({case.get("saw", "?") for case in group}))
        lines.append(f"| {point} | {signal} | {passed}/{len(group)} | {median} | {slowest} | {saw} |")
    return "\n".join(lines)


def main(*files: str) -> None:
    """Print the table and the sums of one or more files."""
    cases = [case for file in files for case in json.loads(Path(file).read_text())["cases"]]
    print(table(cases))
    print(json.dumps(summary(cases)))


if __name__ == "__main__":
    main(*sys.argv[1:])
