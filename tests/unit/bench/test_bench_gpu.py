"""`python -m benchmarks gpu` as far as it goes without a GPU: its models and limits, its table, its refusal."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks import __main__ as benchmarks
from benchmarks.gpu import measure as gpu_measure
from benchmarks.gpu import report as gpu
from benchmarks.kernels.roofline import Work, decode_step, prefill
from tandem.engine.engine import SequenceInput


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


def test_the_table_says_what_is_met() -> None:
    figures = (
        gpu.Figure("1b", "prefill of 4,096 tokens", 4096, seconds=0.020, least_s=0.010, goal=0.5),
        gpu.Figure("8b", "decode, batch 1, context 512", 1, seconds=0.010, least_s=0.004, goal=0.6),
    )
    report = gpu.Report({"name": "a GPU"}, gpu.GpuLimits(8e14, 4e12), {"1b": "triton"}, {"1b": "16 layer"}, figures)
    columns = [list(column.cells) for column in gpu.table(report).columns]
    assert columns[4] == ["50%", "40%"]
    assert columns[6] == ["met", "missed"]
    assert columns[7] == ["204,800", "100"]
    assert gpu.heading(report) == "a GPU: 800 TFLOP/s in bfloat16, 4,000 GB/s; 1b: triton attention, fused: 16 layer"
    assert [figure["is_met"] for figure in report.as_json()["figures"]] == [True, False]


def test_what_is_measured_is_one_forward_pass_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, with a model of two small layers: `forward` is asked for exactly the steps that the table speaks of."""
    sizes = {
        "vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "intermediate_size": 64, "max_position_embeddings": 64,
    }  # fmt: skip
    engine = gpu_measure.random_engine(
        sizes, torch.device("cpu"), dtype="float32", page_size=16, num_pages=8, max_num_seqs=2
    )
    steps: list[list[tuple[int, int]]] = []  # of each pass: where each sequence's tokens begin, and how many they are
    forward = engine.forward

    def watched(batch: Sequence[SequenceInput]) -> torch.Tensor:
        steps.append([(one.start, len(one.token_ids)) for one in batch])
        return forward(batch)

    monkeypatch.setattr(engine, "forward", watched)
    assert gpu_measure.prefill_s(engine, 20, num_repeats=3) > 0
    assert steps == [[(0, 20)]] * 4
    steps.clear()
    assert gpu_measure.decode_s(engine, 2, 20, num_steps=4) > 0
    assert steps == [[(0, 18)], [(0, 18)], *([(at, 1), (at, 1)] for at in (18, 19, 20, 21))]


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert benchmarks.main(["gpu"]) == 2
    assert "sees no CUDA device" in capsys.readouterr().err


@pytest.mark.processes
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
