"""Packed products against torch's, and what torch's cannot promise: a row's result is its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from weakref import ref

import pytest
import torch
from engine_helpers import environment_without_wide_vectors
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.pytorch_utils import Conv1D

from tandem.engine.cpu import packed_linear, vector_ir
from tandem.engine.cpu.modules import FusedGatedMLP
from tandem.engine.cpu.packed_kernel import BY_TWO, QUANTIZED, QUANTIZED_BY_TWO, Products
from tandem.engine.cpu.packed_linear import PackedLinear, pack
from tandem.engine.cpu.panels import Panels, Rounding
from tandem.engine.cpu.tiles_kernel import IN_TILES
from tandem.engine.cpu.tiles_quantized import QUANTIZED_IN_TILES
from tandem.engine.cpu.vector_ir import has_bfloat16_products, has_bfloat16_tiles, has_wide_vectors

ROOT = Path(__file__).resolve().parents[3]
SHORT = (torch.bfloat16, torch.float16)
ROWS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 16, 23, 24, 25, 32, 65)


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize(("num_out", "num_in"), [(32, 8), (64, 100), (96, 768), (50, 17), (1, 1), (33, 64)])
def test_products_are_those_of_torch(num_out: int, num_in: int, num_threads: int) -> None:
    weight, bias = draw(num_out, num_in, seed=1), draw(num_out, seed=2)
    packed = PackedLinear(weight, bias, num_threads)
    for rows in ROWS:
        x = draw(rows, num_in, seed=rows)
        exact = x.double() @ weight.double().T + bias.double()
        torch.testing.assert_close(packed(x).double(), exact, rtol=1e-5, atol=1e-5 * num_in**0.5)


@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_row_does_not_depend_on_what_is_beside_it(num_threads: int) -> None:
    packed = PackedLinear(draw(200, 300), None, num_threads)
    x = draw(70, 300, seed=3)
    alone = torch.cat([packed(row[None]) for row in x])
    for rows in ROWS:
        assert torch.equal(packed(x[:rows]), alone[:rows]), f"{rows} rows"
        assert torch.equal(packed(x[70 - rows :]), alone[70 - rows :]), f"the last {rows} rows"


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("dtype", SHORT)
@pytest.mark.parametrize(("num_out", "num_in"), [(32, 8), (96, 768), (50, 17), (1, 1)])
def test_weights_of_16_bits_give_the_bits_of_float32(
    num_out: int, num_in: int, dtype: torch.dtype, num_threads: int
) -> None:
    weight, bias = draw(num_out, num_in, seed=1).to(dtype), draw(num_out, seed=2).to(dtype)
    short, wide = PackedLinear(weight, bias, num_threads), PackedLinear(weight.float(), bias.float(), num_threads)
    for rows in ROWS:
        x = draw(rows, num_in, seed=rows)
        assert torch.equal(short(x), wide(x)), f"{rows} rows"


by_two = pytest.mark.skipif(not has_bfloat16_products(), reason="this CPU does not multiply bfloat16")


@by_two
@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize(("num_out", "num_in"), [(32, 8), (96, 768), (50, 18), (1, 2), (200, 300)])
def test_products_by_two_are_of_rounded_rows_and_each_row_is_its_own(
    num_out: int, num_in: int, num_threads: int
) -> None:
    weight, bias = draw(num_out, num_in, seed=1).bfloat16(), draw(num_out, seed=2)
    packed = PackedLinear(weight, bias, num_threads)
    packed.panels.multiply_short()
    x = draw(70, num_in, seed=3)
    exact = x.bfloat16().double() @ weight.double().T + bias.double()
    alone = torch.cat([packed(row[None]) for row in x])
    torch.testing.assert_close(alone.double(), exact, rtol=1e-5, atol=1e-5 * num_in**0.5)
    for rows in ROWS:
        assert torch.equal(packed(x[:rows]), alone[:rows]), f"{rows} rows"
        assert torch.equal(packed(x[70 - rows :]), alone[70 - rows :]), f"the last {rows} rows"


in_tiles = pytest.mark.skipif(not has_bfloat16_tiles(), reason="this CPU has no tiles of bfloat16")


@in_tiles
@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize(("num_out", "num_in"), [(32, 32), (96, 768), (50, 64), (1, 96), (200, 320), (40, 8192)])
def test_products_in_tiles_are_of_rounded_rows_and_each_row_is_its_own(
    num_out: int, num_in: int, num_threads: int
) -> None:
    weight, bias = draw(num_out, num_in, seed=1).bfloat16(), draw(num_out, seed=2)
    packed = PackedLinear(weight, bias, num_threads)
    packed.panels.multiply_short(in_tiles=True)
    assert packed.panels.products is IN_TILES
    x = draw(70, num_in, seed=3)
    exact = x.bfloat16().double() @ weight.double().T + bias.double()
    alone = torch.cat([packed(row[None]) for row in x])
    torch.testing.assert_close(alone.double(), exact, rtol=1e-5, atol=1e-5 * num_in**0.5)
    for rows in range(1, 71):
        assert torch.equal(packed(x[:rows]), alone[:rows]), f"{rows} rows"
        assert torch.equal(packed(x[70 - rows :]), alone[70 - rows :]), f"the last {rows} rows"
    assert torch.equal(packed(torch.cat([x] * 4)), torch.cat([alone] * 4)), "280 rows"
    assert packed(x[:0]).shape == (0, num_out)


@in_tiles
def test_even_and_odd_numbers_of_a_tile_have_sums_of_their_own() -> None:
    """What is one tiny number beside two great ones that cancel is kept where it is not added to them."""
    weight = torch.zeros(32, 64, dtype=torch.bfloat16)
    weight[:, 0], weight[:, 2], weight[:, 1] = 2.0**20, -(2.0**20), 2.0**-20
    packed, by_two = (PackedLinear(weight, None, 1) for _ in range(2))
    packed.panels.multiply_short(in_tiles=True)
    by_two.panels.multiply_short()
    ones = torch.ones(1, 64)
    assert torch.all(packed(ones) == 2.0**-20)
    assert torch.all(by_two(ones) == 0.0)


@in_tiles
@pytest.mark.parametrize(("num_in", "num_rows"), [(64, 37), (64, 33), (8192, 150)])
def test_gated_products_in_tiles_are_the_same_for_each_row_alone(num_in: int, num_rows: int) -> None:
    """Of 8,192 numbers 128 rows are multiplied together, and then the others."""
    gate, up = (nn.Linear(num_in, 70, bias=True, dtype=torch.bfloat16) for _ in range(2))
    mlp = FusedGatedMLP(gate, up, nn.Linear(70, num_in, bias=False, dtype=torch.bfloat16), 1)
    mlp.panels.multiply_short(in_tiles=True)
    x = draw(num_rows, num_in, seed=3)
    whole = mlp(x)
    for row in (0, 1, 31, 32, num_rows - 1):
        assert torch.equal(whole[row], mlp(x[row][None])[0]), f"row {row}"
    rounded = x.bfloat16().double()
    wide = [rounded @ layer.weight.double().T + layer.bias.double() for layer in (gate, up)]
    exact = (nn.functional.silu(wide[0]) * wide[1]) @ mlp_down(mlp)
    torch.testing.assert_close(whole.double(), exact, rtol=1e-3, atol=1e-3)
    assert mlp(x[:0]).shape == (0, num_in)


_BESIDE_OTHERS = """
import threading, numpy as np, torch
from torch import nn
from tandem.engine.cpu.modules import FusedGatedMLP

with torch.inference_mode():
    sizes = (1024, 2048), (1024, 2048), (2048, 1024)
    mlp = FusedGatedMLP(*(nn.Linear(*size, bias=False, dtype=torch.bfloat16) for size in sizes), 1)
    mlp.panels.multiply_short(in_tiles=True)
    x = torch.randn(256, 1024)
    expected = mlp(x)
    found = []
    compute = torch.inference_mode()(lambda: found.extend(mlp(x) for _ in range(20)))
    worker = threading.Thread(target=compute)
    worker.start()
    while worker.is_alive():
        others = [np.zeros(2048 + extra, dtype=np.float32) for extra in range(0, 64, 4)]
        assert not any(other.any() for other in others)
    assert len(found) == 20 and all(torch.equal(one, expected) for one in found)
"""


@in_tiles
@pytest.mark.processes
def test_a_kernel_keeps_its_memory_as_long_as_it_computes() -> None:
    """What others allocate meanwhile is theirs, also where it is as large and all threads have one heap."""
    environment = {**os.environ, "MALLOC_ARENA_MAX": "1"}
    command = [sys.executable, "-c", _BESIDE_OTHERS]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr


def mlp_down(mlp: FusedGatedMLP) -> torch.Tensor:
    """`[inner, out]`: of weights, as products with a unit each."""
    return mlp.down(torch.eye(70)).double()


@in_tiles
def test_what_a_process_may_not_use_it_says_and_does_without(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(vector_ir, "_ARCH_REQ_XCOMP_PERM", 0)  # no request that Linux knows
    assert not has_bfloat16_tiles.__wrapped__()
    assert "set model.kernels: vectors" in caplog.text
    monkeypatch.setattr("tandem.engine.cpu.panels.has_bfloat16_tiles", lambda: False)
    packed = PackedLinear(draw(40, 64).bfloat16(), None, 1)
    packed.panels.multiply_short(in_tiles=True)
    assert packed.panels.products is BY_TWO


@in_tiles
def test_what_is_not_of_whole_tiles_goes_by_two() -> None:
    packed, by_two, x = *(PackedLinear(draw(40, 48).bfloat16(), None, 1) for _ in range(2)), draw(3, 48, seed=1)
    packed.panels.multiply_short(in_tiles=True)
    by_two.panels.multiply_short()
    assert torch.equal(packed(x), by_two(x))


def prepare(panels: Panels, bits: int | None, is_short: bool) -> None:
    """Whole numbers of so many bits, if any, and all by two."""
    if bits is not None:
        panels.quantize(Rounding(bits))
    if is_short:
        panels.multiply_short()


KINDS = [
    *[(dtype, None, False) for dtype in (torch.float32, *SHORT)],
    *[(torch.float32, bits, False) for bits in (8, 4)],
    *[pytest.param(dtype, bits, True, marks=by_two)
      for dtype, bits in ((torch.bfloat16, None), (torch.float32, 8), (torch.float32, 4))],
]  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize(("dtype", "bits", "is_short"), KINDS)
def test_rows_of_several_blocks_get_what_they_get_in_one_pass(
    dtype: torch.dtype, bits: int | None, is_short: bool, num_threads: int
) -> None:
    """Of plain weights 1,304 numbers are multiplied in three parts; 330 outputs are no whole number of blocks; 1,030
    rows are those of three blocks, the last one of few."""
    packed = PackedLinear(draw(330, 1304, seed=1).to(dtype), draw(330, seed=2), num_threads)
    prepare(packed.panels, bits, is_short)
    x = draw(1030, 1304, seed=3)
    apart = torch.cat([packed(part) for part in x.split(6)])
    for rows in (7, 12, 13, 36, 37, 65, 504, 505, 1030):
        assert torch.equal(packed(x[:rows]), apart[:rows]), f"{rows} rows"


@pytest.mark.long
@pytest.mark.parametrize(("dtype", "bits", "is_short"), KINDS)
def test_gated_rows_of_several_blocks_get_what_they_get_in_one_pass(
    dtype: torch.dtype, bits: int | None, is_short: bool
) -> None:
    gate, up = (nn.Linear(648, 170, bias=True, dtype=dtype) for _ in range(2))
    mlp = FusedGatedMLP(gate, up, nn.Linear(170, 648, bias=False, dtype=dtype), 1)
    prepare(mlp.panels, bits, is_short)
    x = draw(520, 648, seed=3)
    apart = torch.cat([mlp(part) for part in x.split(6)])
    for rows in (13, 37, 520):
        assert torch.equal(mlp(x[:rows]), apart[:rows]), f"{rows} rows"


@pytest.mark.parametrize(("dtype", "num_in"), [(torch.bfloat16, 7), (torch.float16, 8), (torch.float32, 8)])
def test_what_does_not_go_by_two_is_widened(dtype: torch.dtype, num_in: int) -> None:
    packed, x = PackedLinear(draw(40, num_in).to(dtype), None, 1), draw(3, num_in, seed=1)
    before = packed(x)
    packed.panels.multiply_short()
    assert torch.equal(packed(x), before)


def quantized(weight: torch.Tensor, bits: int, bias: torch.Tensor | None = None, num_threads: int = 1) -> PackedLinear:
    packed = PackedLinear(weight, bias, num_threads)
    packed.panels.quantize(Rounding(bits))
    return packed


def weights_of(packed: PackedLinear) -> torch.Tensor:
    """`[N, K]`: what they are after rounding, as the products with a unit each."""
    unit = torch.eye(packed.in_features)
    return packed(unit).T


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(
    ("num_out", "num_in"), [(32, 8), (96, 768), (50, 18), (50, 24), (200, 296), (33, 129), (64, 256)]
)
def test_whole_numbers_are_near_and_each_row_is_its_own(num_out: int, num_in: int, bits: int) -> None:
    """A K into which words of eight numbers of 4 bits do not go gets 8."""
    weight, bias = draw(num_out, num_in, seed=1), draw(num_out, seed=2)
    packed = quantized(weight, bits, bias)
    rounded = weights_of(quantized(weight, bits))
    bits = 8 if num_in % 8 else bits
    group = num_in if bits == 8 else 128
    for begin in range(0, num_in, group):
        those = slice(begin, begin + group)
        most = weight[:, those].abs().amax(dim=1, keepdim=True)
        step = most / (2 ** (bits - 1) - 1)
        error = (rounded[:, those] - weight[:, those]).abs()
        if bits == 8:
            assert torch.all(error <= step / 2 * 1.001)
        else:  # the greatest ones may be cut off, for less error of all
            plain = (weight[:, those] / step).round() * step
            assert torch.all(error.square().sum(1) <= (plain - weight[:, those]).square().sum(1) * 1.001)
    for num_threads in (1, 2):
        packed = quantized(weight, bits, bias, num_threads)
        x = draw(70, num_in, seed=3)
        exact = x.double() @ rounded.double().T + bias.double()
        alone = torch.cat([packed(row[None]) for row in x])
        torch.testing.assert_close(alone.double(), exact, rtol=1e-5, atol=1e-5 * num_in**0.5)
        for rows in ROWS:
            assert torch.equal(packed(x[:rows]), alone[:rows]), f"{rows} rows"
            assert torch.equal(packed(x[70 - rows :]), alone[70 - rows :]), f"the last {rows} rows"


def assert_whole_numbers_meet_rounded_rows_and_each_row_is_its_own(
    num_out: int, num_in: int, rounding: Rounding, products: Products, row_counts: Iterable[int], *, in_tiles: bool
) -> tuple[PackedLinear, torch.Tensor, torch.Tensor]:
    """The layer, 70 rows, and what each of them gives alone."""
    weight, bias = draw(num_out, num_in, seed=1), draw(num_out, seed=2)
    plain, packed, threaded = (PackedLinear(weight, bias, num_threads) for num_threads in (1, 1, 2))
    for each in (plain, packed, threaded):
        each.panels.quantize(rounding)
    for each in (packed, threaded, threaded):  # a second time changes nothing
        each.panels.multiply_short(in_tiles=in_tiles)
        assert each.panels.products is products
    x = draw(70, num_in, seed=3)
    exact = x.bfloat16().double() @ (weights_of(plain) - bias[:, None]).double().T + bias.double()
    alone = torch.cat([packed(row[None]) for row in x])
    torch.testing.assert_close(alone.double(), exact, rtol=1e-5, atol=2e-5 * num_in**0.5)
    for rows in row_counts:
        assert torch.equal(packed(x[:rows]), alone[:rows]), f"{rows} rows"
        assert torch.equal(threaded(x[70 - rows :]), alone[70 - rows :]), f"the last {rows} rows"
    return packed, x, alone


@in_tiles
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(
    ("num_out", "num_in", "group"),
    [(32, 32, 128), (96, 768, 128), (50, 1056, 128), (200, 320, 64), (40, 8192, 128), (33, 1280, 640)],
)
def test_whole_numbers_in_tiles_meet_rounded_rows_and_each_row_is_its_own(
    num_out: int, num_in: int, group: int, bits: int
) -> None:
    """Of 8,192 numbers 128 rows go together; groups of 640 are unpacked in two parts."""
    packed, x, alone = assert_whole_numbers_meet_rounded_rows_and_each_row_is_its_own(
        num_out, num_in, Rounding(bits, group), QUANTIZED_IN_TILES[bits], range(1, 71), in_tiles=True
    )
    assert torch.equal(packed(torch.cat([x] * 4)), torch.cat([alone] * 4)), "280 rows"
    assert packed(x[:0]).shape == (0, num_out)


@in_tiles
@pytest.mark.parametrize("bits", [8, 4])
def test_gated_whole_numbers_in_tiles_are_the_same_for_each_row_alone(bits: int) -> None:
    gate, up = (nn.Linear(256, 70, bias=True) for _ in range(2))
    mlp = FusedGatedMLP(gate, up, nn.Linear(70, 256, bias=False), 1)
    mlp.panels.quantize(Rounding(bits))
    near = mlp(draw(150, 256, seed=3).bfloat16().float())
    mlp.panels.multiply_short(in_tiles=True)
    whole = mlp(draw(150, 256, seed=3))
    torch.testing.assert_close(whole, near, rtol=1e-4, atol=1e-4)
    for row in (0, 1, 31, 32, 149):
        assert torch.equal(whole[row], mlp(draw(150, 256, seed=3)[row][None])[0]), f"row {row}"


@in_tiles
def test_whole_numbers_of_broken_tiles_are_multiplied_by_two() -> None:
    for num_in, group in ((48, 48), (96, 48)):
        packed = PackedLinear(draw(40, num_in), None, 1)
        packed.panels.quantize(Rounding(4, group))
        packed.panels.multiply_short(in_tiles=True)
        assert packed.panels.products is QUANTIZED_BY_TWO[4]


@by_two
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(
    ("num_out", "num_in", "group"),
    [(32, 8, 128), (96, 768, 128), (50, 1048, 128), (200, 296, 64), (40, 8192, 128), (33, 1280, 640), (300, 512, 512)],
)
def test_whole_numbers_by_two_meet_rounded_rows_and_each_row_is_its_own(
    num_out: int, num_in: int, group: int, bits: int
) -> None:
    """Groups of 640 are added up in two parts, and so are all more than 512 numbers of 8 bits."""
    assert_whole_numbers_meet_rounded_rows_and_each_row_is_its_own(
        num_out, num_in, Rounding(bits, group), QUANTIZED_BY_TWO[bits], (*ROWS, 36, 37, 70), in_tiles=False
    )


@by_two
@pytest.mark.parametrize("bits", [8, 4])
def test_gated_whole_numbers_by_two_are_the_same_for_each_row_alone(bits: int) -> None:
    gate, up = (nn.Linear(256, 170, bias=True) for _ in range(2))
    mlp = FusedGatedMLP(gate, up, nn.Linear(170, 256, bias=False), 1)
    mlp.panels.quantize(Rounding(bits))
    x = draw(50, 256, seed=3)
    near = mlp(x.bfloat16().float())
    mlp.panels.multiply_short()
    whole = mlp(x)
    torch.testing.assert_close(whole, near, rtol=1e-4, atol=1e-4)
    for first, last in ((0, 1), (1, 3), (11, 23), (49, 50)):
        assert torch.equal(whole[first:last], mlp(x[first:last])), f"rows from {first} to before {last}"


@by_two
def test_an_odd_number_of_whole_numbers_stays_in_float32() -> None:
    packed = PackedLinear(draw(40, 17), None, 1)
    packed.panels.quantize(Rounding(4))
    packed.panels.multiply_short()
    assert packed.panels.products is QUANTIZED[8]


@pytest.mark.parametrize("bits", [8, 4])
def test_outputs_without_weights_and_extremes_stay(bits: int) -> None:
    weight = torch.zeros(40, 256)
    weight[1, 3], weight[2, 200] = 1e30, -1e-30
    rounded = weights_of(quantized(weight, bits))
    assert torch.isfinite(rounded).all()
    torch.testing.assert_close(rounded, weight, rtol=0.08, atol=0.0)


def products_of_all_row_counts() -> torch.Tensor:
    """520 rows are those of two blocks; 1,304 numbers of K are multiplied in three parts."""
    packed = [PackedLinear(draw(200, 1304).to(dtype), draw(200, seed=1), 1) for dtype in (torch.float32, *SHORT)]
    packed += [quantized(draw(200, 1304), bits, draw(200, seed=1)) for bits in (8, 4)]
    assert packed[-1].panels.numbers.dtype is torch.int32
    x = draw(520, 1304, seed=3)
    return torch.cat([layer(x[:rows]) for layer in packed for rows in (*ROWS, 37, 520)])


@pytest.mark.processes
@pytest.mark.skipif(not has_wide_vectors(), reason="this CPU has no AVX-512: all tests are of the code without")
def test_code_for_shorter_vectors_gives_the_same_bits(tmp_path: Path) -> None:
    program = (
        "import sys, torch; from tandem.engine.cpu.vector_ir import has_wide_vectors; "
        "import test_packed_linear as tests; "
        "torch.save((has_wide_vectors(), tests.products_of_all_row_counts()), sys.argv[1])"
    )
    environment = environment_without_wide_vectors()
    environment["PYTHONPATH"] += f"{os.pathsep}{Path(__file__).parent}"
    subprocess.run([sys.executable, "-c", program, tmp_path / "saved.pt"], env=environment, check=True)
    is_wide, products = torch.load(tmp_path / "saved.pt")
    assert not is_wide
    assert torch.equal(products, products_of_all_row_counts())


def test_leading_dimensions_and_strides_of_the_input_are_free() -> None:
    packed = PackedLinear(draw(40, 24), draw(40, seed=1), 1)
    x = draw(2, 24, 5).transpose(1, 2)
    assert not x.is_contiguous()
    result = packed(x)
    assert result.shape == (2, 5, 40)
    assert torch.equal(result.reshape(10, 40), packed(x.reshape(10, 24)))


def test_all_linear_layers_of_a_model_are_replaced_and_tied_embeddings_stay() -> None:
    config = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, vocab_size=70,
        tie_word_embeddings=True, attention_bias=True,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    ids = torch.arange(10)[None]
    with torch.inference_mode():
        before = model(ids).logits
        assert pack(model, 1) == "packed"
        after = model(ids).logits
    torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-5)
    assert not [name for name, module in model.named_modules() if type(module) is torch.nn.Linear]
    assert model.get_input_embeddings().weight.shape == (70, 32)


def test_originals_are_dropped_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a model is in memory twice while it is packed."""
    model = LlamaForCausalLM(
        LlamaConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, vocab_size=70)
    )
    originals = [ref(module) for module in model.modules() if type(module) is torch.nn.Linear]
    alive: list[int] = []

    class Counting(PackedLinear):
        def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, num_threads: int) -> None:
            alive.append(sum(original() is not None for original in originals))
            super().__init__(weight, bias, num_threads)

    monkeypatch.setattr(packed_linear, "PackedLinear", Counting)
    assert pack(model, 1) == "packed"
    assert alive == list(range(15, 0, -1))


def test_gpt2_style_layers_are_replaced_too() -> None:
    layer = Conv1D(48, 16)
    with torch.no_grad():
        layer.weight.copy_(draw(16, 48))
    x = draw(5, 16, seed=4)
    packed = PackedLinear(layer.weight.T, layer.bias, 1)
    torch.testing.assert_close(packed(x), layer(x), rtol=1e-5, atol=1e-5)


@pytest.mark.faults  # that machine code follows its text is shown in test_compiling.py
@pytest.mark.processes
def test_kernels_on_disk_follow_the_code_that_they_are_made_of(tmp_path: Path) -> None:
    """Numba's cache would go on with machine code of an older `vector_ir.py`."""
    copy = tmp_path / "tandem"
    shutil.copytree(ROOT / "tandem", copy, ignore=shutil.ignore_patterns("__pycache__", "models"))
    program = (
        "import torch; from tandem.engine.cpu.packed_linear import PackedLinear; "
        "print(float(PackedLinear(torch.ones(32, 8), None, 1)(torch.ones(1, 8))[0, 0]))"
    )

    def run() -> float:
        environment = os.environ | {"PYTHONPATH": str(tmp_path)}
        ended = subprocess.run(
            [sys.executable, "-c", program], env=environment, cwd=tmp_path, capture_output=True, text=True, check=True
        )
        return float(ended.stdout)

    assert run() == 8.0
    source = copy / "engine" / "cpu" / "vector_ir.py"
    text = source.read_text()
    assert "[a, b, c]" in text
    source.write_text(text.replace("[a, b, c]", "[a, b, b]"))
    assert run() != 8.0


def test_what_is_wider_keeps_torch() -> None:
    config = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, vocab_size=70
    )
    model = LlamaForCausalLM(config).to(torch.float64)
    assert pack(model, 1) == "torch"
    assert type(model.lm_head) is torch.nn.Linear
