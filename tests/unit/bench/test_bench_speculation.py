"""`python -m benchmarks speculation`: what the page says of what was measured, and one run of it."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import pytest

from benchmarks import docs
from benchmarks.speculation import command
from benchmarks.speculation.section import FORMAT, section
from tandem.bench.report.json_file import read_format
from tandem.core.model_path import resolve_model


def content(*rows: dict[str, Any]) -> dict[str, Any]:
    return {
        "date": "2026-11-28T10:00:00+00:00",
        "machine": {"cpu": "a CPU"},
        "code": {"digest": "0123"},
        "settings": {"draft": "", "quantize": "int8", "threads": 1, "output": 400, "rounds": 8, "lookup_tokens": 8,
                     "draft_tokens": 4},
        "rows": list(rows),
    }  # fmt: skip


def row(
    way: str, ratio: float, *, copies: bool = False, right: int = 0, guesses: int = 0, other: int = 0
) -> dict[str, Any]:
    return {"load": "a load", "copies": copies, "way": way, "tokens_per_s": 100 * ratio, "ratio": ratio,
            "guesses": guesses, "right_guesses": right, "drafts": 0, "right_drafts": 0,
            "rounds_with_other_outputs": other}  # fmt: skip


def test_lookup_is_held_to_its_goals_and_drafts_to_none() -> None:
    lines = list(section(content(
        row("none", 1.0), row("lookup", 0.98, guesses=200, right=50), row("lookup", 1.49, copies=True),
        row("lookup", 1.5, copies=True), row("draft", 0.5, other=2),
    )))[-5:]  # fmt: skip
    assert lines == [
        "| a load | none | 100.0 | 1.00 |  | none |",
        "| a load | lookup | 98.0 | 0.98 (≥ 0.98: reached) | 25% of 200 | none |",
        "| a load | lookup | 149.0 | 1.49 (≥ 1.5: **missed**) |  | none |",
        "| a load | lookup | 150.0 | 1.50 (≥ 1.5: reached) |  | none |",
        "| a load | draft | 50.0 | 0.50 |  | 2 |",
    ]


@pytest.mark.faults
@pytest.mark.processes
def test_it_runs(tmp_path: Path) -> None:
    path, sizes = tmp_path / "speculation.json", command.Sizes(rounds=1, output=32)
    with contextlib.redirect_stdout(io.StringIO()) as said:
        command.run(path, sizes, model=resolve_model("embedded"))
    found = read_format(path, FORMAT, "this")
    assert {each["way"] for each in found["rows"]} == {"none", "lookup", "draft", "lookup and draft"}
    assert all(each["tokens_per_s"] > 0 and not each["rounds_with_other_outputs"] for each in found["rows"])
    assert "## Guesses" in said.getvalue()
    assert "## Guesses" in docs.page(None, of_speculation=found)
