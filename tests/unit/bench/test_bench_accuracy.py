"""What fewer bits do to answers: small, and as a section of the page."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from benchmarks import __main__ as benchmarks_main
from benchmarks import docs
from benchmarks.accuracy.command import WAYS, AccuracySizes, measure
from benchmarks.accuracy.section import GATES, passes, section

EXACT = {"perplexity": 1.4, "divergence": 0.0, "same_token": 1.0, "num_recalled": 99}
CONTENT: dict[str, Any] = {
    "date": "2026-01-01T00:00:00+00:00",
    "code": {"digest": "abc"},
    "settings": {"num_texts": 3, "num_recalls": 100},
    "num_tokens": 1234,
    "ways": {
        "float32": EXACT,
        "int8": {**EXACT, "perplexity": 1.41, "divergence": 0.001, "num_recalled": 97},
        "int4": {**EXACT, "perplexity": 1.5, "same_token": 0.9},
    },
}


def test_each_way_is_judged_beside_float32() -> None:
    page = "\n".join(section(CONTENT))
    assert "| float32 | 1.400 | 0.00000 | 100.0% | 99 of 100 |  |" in page
    assert "| int8 | 1.410 | 0.00100 | 100.0% | 97 of 100 | perplexity ≤ 1.01 ×, 2 of 100 recalled less: pa" in page
    assert "2 of 100 recalled less: **failed** |" in page, "int4 is above its bound"
    assert page in docs.page(None, of_accuracy=CONTENT)


@pytest.mark.parametrize(
    ("change", "passed"), [({}, True), ({"perplexity": 1.42}, False), ({"num_recalled": 96}, False)]
)
def test_a_gate_bounds_perplexity_and_recall(change: dict[str, float], passed: bool) -> None:
    assert passes("int8", {**copy.deepcopy(EXACT), **change}, EXACT, 100) is passed


@pytest.mark.faults
@pytest.mark.processes  # git is asked which code it is
def test_the_embedded_model_is_asked_in_every_type() -> None:
    told: list[str] = []
    content = measure(AccuracySizes(num_texts=2, num_recalls=3), told.append)
    assert [line.partition(":")[0] for line in told] == list(WAYS)
    ways = content["ways"]
    exact = ways["float32"]
    assert (exact["divergence"], exact["same_token"]) == (0.0, 1.0)
    assert 1.0 < exact["perplexity"] < 2.0
    assert exact["num_recalled"] == 3
    assert 0 < ways["int8"]["divergence"] < ways["int4"]["divergence"] < 0.05
    assert 0 < ways["KV in bfloat16"]["divergence"] < ways["KV in int8"]["divergence"] < 0.05
    assert [ways[f"KV in {dtype}"]["types"]["pages"] for dtype in ("bfloat16", "int8")] == ["bfloat16", "int8"]
    assert set(GATES) | {"float32"} == set(WAYS)


def test_the_command_has_the_sizes_of_its_options() -> None:
    options = benchmarks_main.make_parser().parse_args(["accuracy", "--texts", "2", "--recalls", "5"])
    assert (options.texts, options.recalls) == (2, 5)
