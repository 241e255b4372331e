"""What fewer bits do to answers: small, and as a section of the page."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from benchmarks import __main__ as benchmarks_main
from benchmarks import docs
from benchmarks.accuracy.command import (
    AccuracySizes,
    Answers,
    Questions,
    measure,
    measure_checkpoint,
    measure_way,
)
from benchmarks.accuracy.section import passes, section
from benchmarks.accuracy.ways import CHECKPOINTS, EXACT, GATES, SHORT_WAYS, WAYS
from tandem.engine.engine import Engine

OF_EXACT = {"perplexity": 1.4, "divergence": 0.0, "same_token": 1.0, "num_recalled": 99}
OF_AWQ = {**OF_EXACT, "divergence": 0.002, "added": 1.2e-5, "types": {"quantized": "int8"}}
CONTENT: dict[str, Any] = {
    "date": "2026-01-01T00:00:00+00:00",
    "code": {"digest": "abc"},
    "settings": {"num_texts": 3, "num_recalls": 100},
    "num_tokens": 1234,
    "ways": {
        "float32": OF_EXACT,
        "int8": {**OF_EXACT, "perplexity": 1.41, "divergence": 0.00006, "num_recalled": 97},
        "int4": {**OF_EXACT, "perplexity": 1.5, "same_token": 0.9},
    },
    "checkpoints": {"AWQ": OF_AWQ, "compressed-tensors, W4A16": OF_AWQ},
}


def test_each_way_is_judged_beside_float32() -> None:
    page = "\n".join(section(CONTENT))
    assert "| float32 | 1.400 | 0.000000 | 100.0% | 99 of 100 |  |" in page
    assert "| int8 | 1.410 | 0.000060 | 100.0% | 97 of 100 | ≤ 1.01 ×, 7e-05 nats, 2 of 100 recalled less: pa" in page
    assert "≤ 1.06 ×, 0.02 nats, 2 of 100 recalled less: **failed** |" in page, "int4 is above its bound"
    assert page in docs.page(None, of_accuracy=CONTENT)


def test_a_checkpoint_is_judged_by_what_loading_adds_too() -> None:
    page = "\n".join(section(CONTENT))
    row = "| int8 | 1.400 | 0.002000 | 100.0% | 99 of 100 | 1e-05 | "
    row += "≤ 1.02 ×, {} nats, {} added, 2 of 100 recalled less: {} |"
    assert f"| AWQ {row.format('0.007', '4e-05', 'passed')}" in page
    failed = row.format("0.01", "1e-09", "**failed**")
    assert f"| compressed-tensors, W4A16 {failed}" in page, "its numbers are to be kept"


@pytest.mark.parametrize(
    ("change", "passed"),
    [
        ({}, True), ({"perplexity": 1.429}, False), ({"divergence": 0.011}, False), ({"added": 2e-4}, False),
        ({"num_recalled": 96}, False),
    ],
)  # fmt: skip
def test_a_gate_bounds_each_figure(change: dict[str, float], passed: bool) -> None:
    assert passes("AWQ", {**copy.deepcopy(OF_AWQ), **change}, OF_EXACT, 100) is passed


def test_every_way_and_checkpoint_has_a_gate() -> None:
    assert set(GATES) == {*WAYS, *SHORT_WAYS, *CHECKPOINTS} - {EXACT}
    assert all((GATES[name].added is None) is (name not in CHECKPOINTS) for name in GATES)


FEW = AccuracySizes(num_texts=4, num_recalls=3)


@pytest.fixture(scope="module")
def few() -> tuple[Questions, Answers]:
    """A few of the questions, and what float32 answers."""
    questions = Questions.make(FEW)
    return questions, questions.ask(Engine.load(questions.model_dir, num_pages=64, dtype="float32"))


@pytest.mark.long
@pytest.mark.parametrize("name", ["int8", "int4"])
def test_each_type_passes_its_gate(name: str, few: tuple[Questions, Answers]) -> None:
    questions, exact = few
    found = measure_way(name, questions, exact)
    assert passes(name, found, exact.beside(exact), FEW.num_recalls), found
    assert found["divergence"] > 0


@pytest.mark.long
@pytest.mark.parametrize("name", ["GPTQ, 4 bits", "AWQ", "compressed-tensors, W8A16", "FP8, blocks of 128"])
def test_each_quantised_checkpoint_passes_its_gate(name: str, few: tuple[Questions, Answers]) -> None:
    questions, exact = few
    found = measure_checkpoint(name, questions, exact)
    assert passes(name, found, exact.beside(exact), FEW.num_recalls), found
    assert 0 < found["added"] < found["divergence"]


@pytest.mark.faults
@pytest.mark.processes  # git is asked which code it is
def test_the_embedded_model_passes_every_gate() -> None:
    told: list[str] = []
    content = measure(FEW, told.append)
    assert [line.partition(":")[0] for line in told] == [*WAYS, *CHECKPOINTS]
    ways = content["ways"]
    exact = ways["float32"]
    for name, found in {**ways, **content["checkpoints"]}.items():
        assert name == EXACT or passes(name, found, exact, FEW.num_recalls), (name, found)
    assert (exact["divergence"], exact["same_token"]) == (0.0, 1.0)
    assert 1.0 < exact["perplexity"] < 2.0
    assert exact["num_recalled"] == 3
    assert 0 < ways["int8"]["divergence"] < ways["int4"]["divergence"] < 0.05
    assert 0 < ways["KV in bfloat16"]["divergence"] < ways["KV in int8"]["divergence"] < 0.05
    assert [ways[f"KV in {dtype}"]["types"]["pages"] for dtype in ("bfloat16", "int8")] == ["bfloat16", "int8"]
    kept = {name: found["types"]["quantized"] for name, found in content["checkpoints"].items()}
    fours = {"GPTQ, 4 bits", "compressed-tensors, W4A16"}
    assert kept == {name: "int4" if name in fours else "int8" for name in CHECKPOINTS}


def test_the_command_has_the_sizes_of_its_options() -> None:
    options = benchmarks_main.make_parser().parse_args(["accuracy", "--texts", "2", "--recalls", "5"])
    assert (options.texts, options.recalls) == (2, 5)
