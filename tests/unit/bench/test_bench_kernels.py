"""`python -m benchmarks kernels`: its arithmetic by hand, its tables from a sample, and a small real run."""

from __future__ import annotations

import io
import itertools
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig

from benchmarks import __main__ as benchmarks
from benchmarks.kernels import command as kernels_command
from benchmarks.kernels import roofline as cost
from benchmarks.kernels.cases import Sizes, scattered_pages
from benchmarks.kernels.measure import DEFAULT_MODEL, shape_of, thread_counts
from benchmarks.kernels.multiply_adds import MultiplyAdds
from benchmarks.kernels.prompt_attention import PromptRun, PromptSizes, attention_flop
from benchmarks.kernels.roofline import Figure, Limits, ModelShape, Probe, Report, Work
from benchmarks.kernels.weight_types import (
    BY_TWO,
    IN_TILES,
    WHOLE_BY_TWO,
    WeightRun,
    WeightSizes,
    measure_weights,
    weight_types,
)
from benchmarks.timing import Timing, rates_in_turn, timed
from tandem.bench.other_load import OtherLoad
from tandem.core.errors import ConfigError
from tandem.engine.cpu.vector_ir import has_bfloat16_products, has_bfloat16_tiles
from tandem.engine.random_model import ModelSpec, make_config
from tests.support.imports import loaded_by

#: Of the default model: 12 layers of 768 × (768 + 256 + 256 + 768) and 3 × 768 × 2,048; a head of 768 × 8,192.
LAYER_WEIGHTS = 12 * (768 * 2_048 + 3 * 768 * 2_048)
M82 = ModelShape(LAYER_WEIGHTS, 768 * 8_192, (768, 2_048), 12, 12, 4, 64, 8_192)

TINY = ModelSpec(hidden=32, layers=2, heads=4, kv_heads=2, intermediate=48, vocab=64, max_positions=64)
TINY_SIZES = Sizes(
    decode_batches=(1, 2), decode_context=40, prompt=48, attention_batch=2, attention_context=33, linear_rows=(1, 5),
    matrix_size=32, cold_bytes=1 << 16, budget_s=0.001, probe_budget_s=0.001,
)  # fmt: skip

TINY_PROMPTS = PromptSizes(
    head_dims=(8, 24), contexts=(40, 100), chunk=33, num_heads=4, num_kv_heads=2, rounds=1, limit_steps=100
)  # fmt: skip

TINY_WEIGHTS = WeightSizes(
    in_features=136, out_features=64, rows=(1, 8, 20), cold_bytes=1 << 16, rounds=1, limit_steps=100
)  # fmt: skip

# Two libraries for products, two for reading; the best: 100 GFLOP/s and 20 GB/s.
LIMITS = Limits(2, (Probe("mm", 9e10), Probe("dnn", 1e11)), (Probe("loop", 2e10), Probe("torch", 1e10)))


def save_config(config: Any, directory: Path) -> Path:
    config.save_pretrained(directory)
    return directory


# --- arithmetic -------------------------------------------------------------------------------------------------------


def test_the_default_model_is_counted_right(tmp_path: Path) -> None:
    assert shape_of(save_config(make_config(DEFAULT_MODEL), tmp_path), Sizes()) == M82
    assert LAYER_WEIGHTS == 75_497_472


def test_linear_layers_that_are_stored_transposed_are_counted(tmp_path: Path) -> None:
    spec = ModelSpec(arch="gpt2", hidden=32, layers=2, heads=4, intermediate=80, vocab=64, max_positions=64)
    shape = shape_of(save_config(make_config(spec), tmp_path), TINY_SIZES)
    assert shape.layer_weights == 2 * (32 * 96 + 32 * 32 + 2 * 32 * 80)
    assert shape.head_weights == 32 * 64
    assert shape.largest_linear == (32, 96)
    assert (shape.num_heads, shape.num_kv_heads, shape.head_dim) == (4, 4, 8)


def test_a_decode_step_reads_the_weights_once_and_the_kv_of_each_sequence() -> None:
    # 81,788,928 weights of 4 bytes; K and V of 4 heads of 64 in 12 layers: 24,576 bytes a token.
    assert cost.decode_step(M82, 1, 512) == Work(327_155_712 + 12_582_912, 163_577_856 + 18_874_368)
    assert cost.decode_step(M82, 8, 512) == Work(327_155_712 + 8 * 12_582_912, 8 * (163_577_856 + 18_874_368))


def test_a_prefill_attends_causally_and_makes_logits_of_one_token() -> None:
    work = cost.prefill(M82, 1024)
    # In eleven of twelve layers 1,024 × 1,025 / 2 pairs of tokens, 12 heads × 64 × 4. In the last one K and V of all,
    # 768 to 512 features; all else of it, and the head, for one token that attends to 1,024.
    one_layer, keys_and_values = LAYER_WEIGHTS // 12, 768 * 512
    of_all = 11 * one_layer + keys_and_values
    assert work.flop == (
        2 * 1024 * of_all + 2 * (one_layer - keys_and_values + 768 * 8_192) + (524_800 * 11 + 1024) * 3_072
    )
    assert work.num_bytes == 327_155_712 + 1024 * 24_576


def test_the_other_kernels_are_counted() -> None:
    assert cost.decode_attention(M82, 16, 1536) == Work(50_331_648, 75_497_472)
    assert cost.linear(8, 768, 2048) == Work(4 * (768 * 2048 + 8 * 768), 25_165_824)
    # int4: half a byte a weight, and a float32 for each output and 128 inputs.
    assert cost.linear(8, 768, 2048, 786_432 + 4 * 2048 * 6) == Work(786_432 + 49_152 + 4 * 8 * 768, 25_165_824)
    assert cost.greedy_sampling(8, 8192) == Work(262_144, 0)
    assert cost.digest(65_536) == Work(65_536, 0)


def test_each_token_of_a_chunk_is_counted_with_what_it_sees() -> None:
    # The last three of five tokens see 3 + 4 + 5 of them: a score and a weighted value each, two operations a number.
    assert attention_flop(4, 64, chunk=3, context=5) == 12 * 4 * 64 * 4


def test_the_limit_is_the_longer_of_reading_and_computing() -> None:
    reading, computing = Work(2 * 10**9, 10**9), Work(10**9, 10**10)
    assert LIMITS.seconds(reading) == pytest.approx(0.1)
    assert LIMITS.is_memory_bound(reading)
    assert LIMITS.seconds(computing) == pytest.approx(0.1)
    assert not LIMITS.is_memory_bound(computing)


def test_of_two_measurements_each_probe_keeps_its_better_one() -> None:
    later = Limits(2, (Probe("mm", 1.2e11), Probe("dnn", 8e10)), (Probe("loop", 1.9e10), Probe("torch", 1e9)))
    better = Limits(2, (Probe("mm", 1.2e11), Probe("dnn", 1e11)), (Probe("loop", 2e10), Probe("torch", 1e10)))
    assert LIMITS.or_better(later) == later.or_better(LIMITS) == better


def test_a_share_is_of_the_median_run() -> None:
    figure = Figure("decode", "decode", Work(2 * 10**9, 10**9), Timing(0.1, 0.125, 9))
    assert figure.share(LIMITS) == pytest.approx(0.8)
    assert figure.rate(LIMITS) == pytest.approx(16e9)


def test_timing_leaves_out_the_first_run_and_fills_its_budget() -> None:
    now = 0.0
    durations: Iterator[float] = itertools.chain([50.0], itertools.cycle([3.0, 1.0, 2.0, 9.0]))

    def work() -> None:
        nonlocal now
        now += next(durations)

    assert timed(work, 10.0, clock=lambda: now) == Timing(1.0, 2.5, 4)
    assert timed(work, 0.0, clock=lambda: now).num_runs == 3


def test_tasks_take_turns_and_their_best_counted_round_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    now, told = 0.0, []
    durations = {"a": iter([9.0, 2.0, 1.0]), "b": iter([9.0, 4.0, 8.0])}

    def run(name: str) -> None:
        nonlocal now
        now += next(durations[name])
        told.append(name)

    monkeypatch.setattr("time.thread_time", lambda: now)
    rates = rates_in_turn([(10, lambda: run("a")), (20, lambda: run("b"))], rounds=2, num_threads=1)
    assert rates == [10.0, 5.0]
    assert told == ["a", "b"] * 3


def test_a_product_is_bound_by_reads_or_by_multiply_adds() -> None:
    # 2 GB in 0.125 s where 0.1 are needed; 10 GFLOP in 0.2 s where 0.1 are.
    few = WeightRun("bfloat16", 1, Work(2 * 10**9, 10**9), 0.125, LIMITS, 0.0)
    many = WeightRun("int4", 512, Work(10**9, 10**10), 0.2, LIMITS, 0.0)
    assert (few.bound, many.bound) == ("reads", "multiply-adds")
    assert (few.share, few.share_of_reads, few.share_of_multiply_adds) == pytest.approx((0.8, 0.8, 0.08))
    assert (many.share, many.share_of_reads, many.share_of_multiply_adds) == pytest.approx((0.5, 0.25, 0.5))
    assert (few.goal, many.goal) == (0.8, None)


# --- tables -----------------------------------------------------------------------------------------------------------


def text_of(table: Table) -> list[list[str]]:
    """Its rows, as the cells that a reader sees."""
    console = Console(file=io.StringIO(), width=160)
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    return [[cell for cell in line.split("  ") if cell.strip()] for line in console.file.getvalue().splitlines()]


def cells(table: Table, name: str) -> list[str]:
    (row,) = [[cell.strip() for cell in line] for line in text_of(table) if line and line[0].strip() == name]
    return row[1:]


SAMPLE = Report(
    LIMITS,
    (
        Figure("decode", "decode, batch 1", Work(2 * 10**9, 10**9), Timing(0.1, 0.125, 9), 0.7),
        Figure("linear", "linear, 16 rows", Work(10**6, 10**9), Timing(0.008, 0.009, 1234)),
        Figure("linear", "linear, 1 row", Work(10**6, 10**7), Timing(0.001, 0.002, 7)),
    ),
    other_load=0.7,
)


def test_the_table_of_limits_names_the_best_probes_and_the_own_product() -> None:
    table = kernels_command.limit_table(SAMPLE)
    assert cells(table, "mm") == ["90.0 GFLOP/s"]
    assert cells(table, "dnn") == ["100.0 GFLOP/s", "limit"]
    assert cells(table, "loop") == ["20.0 GB/s", "limit"]
    assert cells(table, "torch") == ["10.0 GB/s"]
    assert cells(table, "Tandem's linear, 16 rows") == ["125.0 GFLOP/s", "no limit: to compare"]


def test_the_table_of_kernels_gives_share_and_goal() -> None:
    table = kernels_command.kernel_table(SAMPLE)
    assert cells(table, "decode, batch 1") == ["125.0", "100.0", "9", "100.0", "16.0 GB/s", "80%", "≥ 70%"]
    assert cells(table, "linear, 16 rows") == ["9.000", "8.000", "1,234", "10.0", "111.1 GFLOP/s", "111%"]


def test_a_machine_that_was_not_quiet_is_remarked() -> None:
    assert list(kernels_command.remarks([SAMPLE])) == [
        "2 threads: others used 0.7 cores meanwhile: no figure is reliable"
    ]
    assert not list(kernels_command.remarks([replace(SAMPLE, other_load=0.05)]))


def test_the_table_of_prompts_gives_shares_of_the_limit() -> None:
    table = kernels_command.prompt_table([PromptRun(2, 96, 8_192, 2e11, 1.5e11, 9e10, 0.0)])
    assert cells(table, "2") == ["96", "8,192", "200.0", "150.0", "75%", "90.0", "45%", "≥ 70%"]


def test_the_table_of_weights_gives_both_shares() -> None:
    run = WeightRun("bfloat16", 1, Work(2 * 10**9, 10**9), 0.125, LIMITS, 0.0)
    table = kernels_command.weight_table([run])
    assert cells(table, "2") == ["bfloat16", "1", "125.0", "100.0", "reads", "80%", "8%", "80%", "≥ 80%"]


@pytest.fixture
def on_one_core() -> Iterator[None]:
    """This thread, and what it starts, share a core: what one of them uses the others do not."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    yield
    os.sched_setaffinity(0, cores)


@pytest.mark.processes
@pytest.mark.usefixtures("on_one_core")
def test_load_of_others_is_told_from_ones_own() -> None:
    load, start_s, start_cpu_s = OtherLoad(), time.monotonic(), time.process_time()
    while time.monotonic() < start_s + 0.7:
        pass
    own = (time.process_time() - start_cpu_s) / (time.monotonic() - start_s)
    assert load.cores() < 1 - own + 0.1

    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        child, load, start_s = psutil.Process(busy.pid), OtherLoad(), time.monotonic()
        start_cpu_s = child.cpu_times().user
        with pytest.raises(subprocess.TimeoutExpired):
            busy.wait(1.0)
        its_own = (child.cpu_times().user - start_cpu_s) / (time.monotonic() - start_s)
        assert its_own > 0.1
        assert load.cores() > its_own - 0.1
    finally:
        busy.kill()
        busy.wait()


# --- real runs --------------------------------------------------------------------------------------------------------


@pytest.mark.processes
def test_a_small_run_gives_finite_figures(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "kernels.json"
    kernels_command.run(
        None, [1], path, sizes=TINY_SIZES, prompt_sizes=TINY_PROMPTS, weight_sizes=TINY_WEIGHTS, random_model=TINY
    )
    content = json.loads(path.read_text())
    (report,) = content["reports"]
    assert content["model"]["layer_weights"] == 2 * (32 * 32 * 2 + 32 * 16 * 2 + 3 * 32 * 48)
    probes = [*report["product_probes"], *report["read_probes"], report["own_product"]]
    assert len({probe["name"] for probe in probes}) == 6
    assert max(probe["rate"] for probe in report["product_probes"]) == report["product_flop_per_s"]
    kinds = [kernel["kind"] for kernel in report["kernels"]]
    assert kinds == ["decode"] * 2 + ["prefill", "attention"] + ["linear"] * 2 + ["sampling"] * 2 + ["digest"]
    numbers = [probe["rate"] for probe in probes]
    for kernel in report["kernels"]:
        assert kernel["timing"]["num_runs"] >= 3
        assert kernel["timing"]["best_s"] <= kernel["timing"]["median_s"]
        numbers += [kernel["timing"]["best_s"], kernel["limit_s"], kernel["share"], kernel["work"]["num_bytes"]]
    assert all(math.isfinite(number) and number > 0 for number in numbers)
    said = capfd.readouterr()
    assert "1 thread: kernels" in said.out
    # Each step was told, the last one as the last.
    total = 16 + len(weight_types())
    assert [line.split()[0] for line in said.err.splitlines()] == [f"{n}/{total}" for n in range(1, total + 1)]
    prompts = content["prompt_attention"]["runs"]
    assert [(found["head_dim"], found["context"]) for found in prompts] == [(8, 40), (8, 100), (24, 40), (24, 100)]
    rates = [found[name] for found in prompts for name in ("limit_flop_per_s", "flop_per_s", "torch_flop_per_s")]
    assert all(math.isfinite(rate) and rate > 0 for rate in rates)
    weights = content["weight_types"]["runs"]
    assert [(found["weights"], found["num_rows"]) for found in weights] == [
        (name, num_rows) for name in weight_types() for num_rows in (1, 8, 20)
    ]
    rates = [found[name] for found in weights for name in ("seconds", "share", "limit_flop_per_s", "limit_bytes_per_s")]
    assert all(math.isfinite(rate) and rate > 0 for rate in rates)
    # What is measured alone is put into what is there.
    path.write_text(json.dumps({**content, "prompt_attention": None, "weight_types": None}))
    kernels_command.run_prompts([1], path, progress=False, sizes=TINY_PROMPTS)
    kernels_command.run_weights([1], path, progress=False, sizes=TINY_WEIGHTS)
    again = json.loads(path.read_text())
    assert again["reports"] == content["reports"]
    assert len(again["prompt_attention"]["runs"]) == 4
    assert len(again["weight_types"]["runs"]) == len(weights)


@pytest.mark.long
def test_each_type_of_weights_is_counted_in_its_bytes() -> None:
    runs = measure_weights(1, replace(TINY_WEIGHTS, rows=(1,)), str)
    bytes_of = {run.weights: run.work.num_bytes - 4 * 136 for run in runs}
    # 64 outputs of 136 inputs; scales for each output, and of int4 for 128 inputs and the eight behind them.
    num = 64 * 136
    expected = {"float32": 4 * num, "bfloat16": 2 * num, "int8": num + 4 * 64, "int4": num // 2 + 2 * 4 * 64}
    assert {name: bytes_of[name] for name in expected} == expected
    assert (BY_TWO in bytes_of) is has_bfloat16_products()
    assert (IN_TILES in bytes_of) is has_bfloat16_tiles()
    assert {bytes_of[name] for name in (BY_TWO, IN_TILES) if name in bytes_of} <= {2 * num}
    whole = {bytes_of[f"int{bits}"]: bytes_of[name] for bits, name in WHOLE_BY_TWO.items() if name in bytes_of}
    assert len(whole) == (2 if has_bfloat16_products() else 0)
    assert all(by_two == widened for widened, by_two in whole.items())


def test_multiply_adds_count_a_multiply_and_an_add_of_every_lane() -> None:
    one, two = MultiplyAdds(1, 10), MultiplyAdds(2, 10, by_two=True)
    assert two.flop == 4 * one.flop
    assert one.flop % (2 * 10 * 8) == 0
    one.run()
    # Each of the sums, which begin with 0, 1, 2 and so on, has grown by one a step.
    num_sums = one.flop // (2 * 10 * one.num_lanes)
    assert set(one.place[one.num_lanes :].tolist()) == {sum(range(num_sums)) + 10.0 * num_sums}


def test_kv_pages_are_too_many_for_a_cache_and_none_is_untouched() -> None:
    arena, tables = scattered_pages(M82, 3, 50, cold_bytes=5 << 20)
    assert arena.num_bytes >= 5 << 20
    assert arena.tensor.count_nonzero() > 0.99 * arena.tensor.numel()
    assert sorted(page for table in tables for page in table) == list(range(3 * 2))
    assert tables[0] != [0, 1]


# --- bad input --------------------------------------------------------------------------------------------------------


def test_threads_are_one_and_all_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _pid: set(range(4)))
    assert thread_counts(None) == [1, 4]
    assert thread_counts([2, 4, 2]) == [2, 4]
    with pytest.raises(ConfigError, match="--threads 5: this process may use 4"):
        thread_counts([5])
    monkeypatch.setattr("os.sched_getaffinity", lambda _pid: {0})
    assert thread_counts(None) == [1]


def test_more_threads_than_cores_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert benchmarks.main(["kernels", "--threads", "9999"]) == 1
    assert "--threads 9999: this process may use" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        benchmarks.main(["kernels", "--threads", "0"])


def test_a_directory_without_a_model_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert benchmarks.main(["kernels", "--threads", "1", "--no-progress", "--model", str(tmp_path)]) == 1
    said = capsys.readouterr()
    assert "has no config.json" in said.err
    assert said.out == ""


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (ModelSpec(max_positions=1023), "its context is shorter than the 1,024 tokens"),
        (ModelSpec(arch="mistral", sliding_window=256, max_positions=2048), "its window of 256 tokens"),
    ],
)
def test_a_model_that_is_too_short_is_refused(tmp_path: Path, spec: ModelSpec, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        shape_of(save_config(make_config(spec), tmp_path), Sizes())


def test_a_mixture_of_experts_is_refused(tmp_path: Path) -> None:
    config = AutoConfig.for_model(
        "mixtral", hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=2, vocab_size=64, max_position_embeddings=2048,
    )  # fmt: skip
    with pytest.raises(ConfigError, match="mixtral is not dense"):
        shape_of(save_config(config, tmp_path), Sizes())


@pytest.mark.processes
def test_the_other_commands_do_not_wait_for_torch() -> None:
    program = "from benchmarks.__main__ import make_parser\n"
    program += "make_parser().parse_args(['kernels', '--threads', '1', '2'])"
    assert loaded_by(program, "torch", "numba", "transformers") == []
