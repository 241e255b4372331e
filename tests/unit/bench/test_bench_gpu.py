"""`python -m benchmarks gpu` as far as it goes without a GPU: its models and limits, its table, its refusal."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks import __main__ as benchmarks
from benchmarks.gpu import check
from benchmarks.gpu import measure as gpu_measure
from benchmarks.gpu import report as gpu
from benchmarks.kernels.roofline import Work, decode_step, prefill
from tandem.engine.engine import Engine, SequenceInput


@pytest.mark.parametrize(("name", "billions"), [("1b", 1.236), ("8b", 8.030)])
def test_the_shapes_are_those_of_the_models(name: str, billions: float) -> None:
    """Counted against `transformers`' own model, without its memory."""
    sizes = gpu.SIZES[name]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(LlamaConfig(**sizes))
    assert sum(parameter.numel() for parameter in model.parameters()) / 1e9 == pytest.approx(billions, abs=1e-3)
    linear = {module.weight for module in model.modules() if isinstance(module, torch.nn.Linear)}
    shape = gpu.shape_of(sizes)
    assert shape.layer_weights + shape.head_weights == sum(weight.numel() for weight in linear)
    assert shape.head_weights == model.lm_head.weight.numel()


def test_a_step_reads_16_bits_for_each_weight() -> None:
    """Of the 8 B model, by hand: 7.5 G weights, and 128 KiB of K and V a token: 2 x 8 heads x 128 x 32 layers."""
    shape, limits = gpu.shape_of(gpu.SIZES["8b"]), gpu.GpuLimits(flop_per_s=1e15, bytes_per_s=1e12)
    weight_bytes = 2 * (shape.layer_weights + shape.head_weights)
    assert weight_bytes / 1e9 == pytest.approx(15.0, abs=0.1)
    kv_bytes = 64 * 512 * 131_072
    assert limits.seconds(decode_step(shape, 64, 512)) == pytest.approx((weight_bytes + kv_bytes) / 1e12)


def test_the_slower_of_products_and_memory_is_the_limit() -> None:
    limits = gpu.GpuLimits(flop_per_s=100.0, bytes_per_s=10.0)
    assert limits.seconds(Work(num_bytes=10, flop=200)) == 2.0
    assert limits.seconds(Work(num_bytes=100, flop=200)) == 5.0
    shape = gpu.shape_of(gpu.SIZES["1b"])
    assert gpu.GpuLimits(1e12, 1e12).seconds(prefill(shape, 4096)) == prefill(shape, 4096).flop / 1e12


def test_the_table_says_what_is_met_and_of_what_a_step_is_made() -> None:
    figures = (
        gpu.Figure("1b", "prefill of 4,096 tokens", 4096, seconds=0.020, least_s=0.010, goal=0.5),
        gpu.Figure("8b", "decode, batch 1, context 512", 1, 0.010, 0.004, 0.6, 0.007, 0.001, 0.002, False),
    )
    limits = gpu.GpuLimits(8e14, 4e12)
    of_1b: tuple[dict[str, Any], ...] = {"1b": "triton"}, {"1b": "16 layer"}, {"1b": {"host": 2e9}}
    report = gpu.Report({"name": "a GPU"}, limits, *of_1b, figures, {"tiny": "no room"})
    head, prefilled, decoded = gpu.table(figures).splitlines()
    assert head.split("  ")[0] == "model"
    assert " ".join(prefilled.split()) == "1b prefill of 4,096 tokens 20.00 10.00 50% 50% met 204,800"
    parts = " ".join(decoded.split("(shared pages)")[1].split())
    assert parts == "10.00 4.00 40% 60% missed 7.00 1.00 2.00 100"
    assert gpu.heading(report) == (
        "a GPU: 800 TFLOP/s in bfloat16, 4,000 GB/s; 1b: triton attention, fused: 16 layer; "
        "1b: digests of pages 2.0 GB/s on the host"
    )
    assert [figure["is_met"] for figure in report.as_json()["figures"]] == [True, False]
    assert report.as_json()["failed"] == {"tiny": "no room"}


@pytest.fixture(scope="module")
def engine() -> Engine:
    return gpu_measure.random_engine(
        gpu.SIZES["tiny"], torch.device("cpu"), dtype="bfloat16", page_size=16, num_pages=9, max_num_seqs=4
    )


Steps = list[list[tuple[int, int, tuple[int, ...]]]]


@pytest.fixture
def steps(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Steps:
    """Of each pass where each sequence's tokens begin, how many they are, and in which pages."""
    found: Steps = []
    forward = engine.forward

    def watched(batch: Sequence[SequenceInput]) -> torch.Tensor:
        found.append([(one.start, len(one.token_ids), tuple(one.pages)) for one in batch])
        return forward(batch)

    monkeypatch.setattr(engine, "forward", watched)
    return found


def test_a_prefill_is_one_forward_pass(engine: Engine, steps: Steps) -> None:
    assert gpu_measure.prefill_s(engine, 20, num_repeats=3) > 0
    assert steps == [[(0, 20, (0, 1))]] * 4


def test_steps_grow_around_their_context_each_in_pages_of_its_own(engine: Engine, steps: Steps) -> None:
    times = gpu_measure.decode_times(engine, 2, 20, num_steps=4)
    assert steps[:4] == [[(at, 1, (0, 1)), (at, 1, (2, 3))] for at in (18, 19, 20, 21)]
    assert set(map(tuple, steps[4:])) == {tuple(steps[0])}, "the model alone is measured on the first of them"
    assert times.has_own_pages
    assert min(times.step_s, times.forward_s, times.sampling_s) > 0


def test_where_memory_does_not_do_pages_are_shared_and_that_is_told(engine: Engine, steps: Steps) -> None:
    assert not gpu_measure.decode_times(engine, 4, 40, num_steps=2).has_own_pages
    assert [pages for _, _, pages in steps[0]] == [(0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 1, 2)]


@pytest.mark.long
def test_what_is_measured_is_told_as_it_comes_and_a_failure_stops_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[int, str | None]] = []
    monkeypatch.setitem(gpu.SIZES, "1b", {"hidden_size": -1})
    report = gpu.measure(
        "cpu", ["1b", "tiny"], lambda so_far, figure: told.append((len(so_far.figures), figure and figure.work))
    )
    assert list(report.failed) == ["1b"]
    works = ["prefill of 40 tokens", "decode, batch 4, context 96", "decode, batch 1, context 24"]
    assert [figure.work for figure in report.figures] == works
    of_works = [(number + 1, work) for number, work in enumerate(works)]
    assert told == [(0, None), (0, None), *of_works, (len(works), None)]
    assert report.digests["tiny"].keys() == {"host"}  # no GPU takes them here


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert benchmarks.main(["gpu"]) == 2
    assert "sees no CUDA device" in capsys.readouterr().err


@pytest.mark.processes
@pytest.mark.faults  # that an engine needs none of them is shown in tests/scenarios/test_few_packages.py
def test_it_needs_no_server_and_no_client() -> None:
    """A machine with GPUs may have what the engine needs, and no more."""
    code = (
        "import sys\n"
        "absent = ('ray', 'fastapi', 'grpc', 'nixl_cu12', 'orjson', 'uvicorn', 'uvloop')\n"
        "sys.modules.update(dict.fromkeys(absent))\n"
        "from benchmarks import __main__ as benchmarks\n"
        "sys.exit(benchmarks.main(['gpu', '--device', 'cuda:99']))\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert (run.returncode, run.stdout) == (2, ""), run.stderr
    assert run.stderr.startswith("python -m benchmarks gpu: ")


@pytest.mark.processes
def test_a_part_that_fails_or_is_late_stops_no_other_and_is_told(tmp_path: Path) -> None:
    """Whatever ends the run, the JSON has the parts that had ended, and says which one was running."""
    look = f"import json; d = json.load(open({str(tmp_path / check.RESULT)!r})); assert d['running'] == 'third', d"
    write = "import sys, pathlib; pathlib.Path(sys.argv[1]).write_text('{\"x\": 1}')"
    third = str(tmp_path / "third.json")
    parts = (
        check.Part("first", ("-c", "import time; print('begun', flush=True); time.sleep(60)"), 1.0, "/none.json"),
        check.Part("second", ("-c", "import sys; sys.exit(3)"), 20.0, "/none.json"),
        check.Part("third", ("-c", f"{look}; {write}", third), 20.0, third),
    )
    assert check.run(parts, tmp_path) == 2
    result = json.loads((tmp_path / check.RESULT).read_text())
    told = {name: (part["passed"], part["ended"], part["result"]) for name, part in result["parts"].items()}
    assert told == {
        "first": (False, "cut off at 1 s", None),
        "second": (False, "exit code 3", None),
        "third": (True, "exit code 0", {"x": 1}),
    }
    assert "running" not in result
    assert "begun" in (tmp_path / check.LOG).read_text()


def test_the_whole_check_takes_less_than_nine_minutes(tmp_path: Path) -> None:
    for small in (False, True):
        assert sum(part.limit_s + check.LAST_WORDS_S for part in check.parts_of(tmp_path, small=small)) < 540 - 5
