"""Grammars made to hold up others, through a real router and real workers: each costs its own request alone."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.scenarios.client import ask, complete
from tests.scenarios.processes import ProcessCluster

pytestmark = pytest.mark.processes

PROMPT = "Once upon a time, there was an animal."
HOSTILE: dict[str, dict[str, Any]] = {
    "states": {"regex": r"a(?s:.*a.{16})"},
    "repetitions behind a literal": {"regex": r"abc((\w|\s){5,2000}[.!?] ){1,300}end"},
    "dots": {"regex": r"a(.{0,500}b.{0,500}c.{0,500}d)"},
    "a forced text": {"regex": "[ab](xyzw x){4000}"},
    "nested": {"regex": "((a{0,100}){0,100}){0,100}"},
    "ambiguous": {"grammar": 'start: "x" s\ns: s s | /[a-z]/'},
    "short lexemes": {"grammar": 'start: "a" w*\nw: c | c c | c c c\nc: /./'},
    "right recursion": {"grammar": 'start: "x" many\nmany: one many | one\none: /[a-z]/'},
    "many lexemes": {
        "grammar": 'start: "a" (' + "|".join(f"T{n}" for n in range(300)) + ")*\n"
        + "".join(f"T{n}: /[a-z ]{{0,{1000 + n}}}{n}/\n" for n in range(300))
    },
    "patterns": {"json": {"type": "string", "pattern": "(.{0,300}a){3}.{0,300}"}},
}  # fmt: skip


def test_ten_hostile_grammars_at_once_change_nothing_for_others(cluster: ProcessCluster) -> None:
    """Each ends as an output does, or with an error that says what it is about; plain requests have their tokens."""
    alone = complete(cluster.url, PROMPT, max_tokens=40, temperature=0)
    with ThreadPoolExecutor(len(HOSTILE)) as pool:
        fields = {"streamed": True, "max_tokens": 60, "temperature": 1.0, "seed": 1}
        asked = {
            name: pool.submit(ask, cluster.url, PROMPT, **fields, structured_outputs=form)
            for name, form in HOSTILE.items()
        }
        beside = [complete(cluster.url, PROMPT, max_tokens=40, temperature=0) for _ in range(3)]
        answers = {name: one.result() for name, one in asked.items()}
    assert [each.token_ids for each in beside] == [alone.token_ids] * 3
    for name, answer in answers.items():
        said = str(answer.error)
        assert answer.error is None or answer.status == 400 or "invalid_request_error" in said, (name, said)
    good = complete(cluster.url, PROMPT, max_tokens=40, structured_outputs={"choice": ["yes", "no"]})
    assert good.texts[0] in ("yes", "no")
