"""K and V in fewer bits: what lies in the pages, and that results are the same bits however the work is cut."""

from __future__ import annotations

from pathlib import Path

import engine_helpers as helpers
import pytest
import torch

from tandem.core.errors import ConfigError
from tandem.engine.arena import KVArena
from tandem.engine.batch import SequenceInput, build_batch
from tandem.engine.cpu.layer_kernels import PLACE_HEADS
from tandem.engine.engine import Engine
from tandem.engine.kv_numbers import GREATEST, LEAST, decode, encode
from tandem.engine.layout import KVLayout
from tandem.engine.loader import Types, choose_kv_dtype

DTYPES = pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
NUM_NEW = 16
INFINITE, NAN = float("inf"), float("nan")
#: What may happen to a head, one number of it.
ODD = [0.0, -0.0, 1.0, 1e-45, -1e-39, 2.0**-101, 3.3e38, 1.00390625, 1.01171875, INFINITE, -INFINITE, NAN]


@pytest.fixture(scope="module", params=["llama", "qwen3", "gpt2"])
def model_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of fused layers, of such with norms of heads and windows, and of a model whose own attention writes the pages."""
    return helpers.save_model(request.param, tmp_path_factory.mktemp("models") / request.param)


def odd_heads(head_dim: int) -> torch.Tensor:
    """`[heads, head_dim]`: one number of each is odd, others are great, small, or zero."""
    heads = torch.randn(3 * len(ODD), head_dim, generator=torch.Generator().manual_seed(0))
    heads[: len(ODD)] *= 1e3
    heads[-len(ODD) :] = 0
    heads[:, 5] = torch.tensor(3 * ODD)
    return heads


@pytest.mark.parametrize("head_dim", [16, 40])
@pytest.mark.parametrize("dtype", PLACE_HEADS)
def test_the_kernel_writes_what_the_plain_code_writes(dtype: str, head_dim: int) -> None:
    heads = odd_heads(head_dim)
    layout = KVLayout(1, 2, head_dim, 3, dtype)
    num_rows = len(heads) // 2
    batch = build_batch([SequenceInput([0] * num_rows, 0, range(20, 0, -1), 0)], 3, torch.device("cpu"))
    found, expected = KVArena(layout, 21), KVArena(layout, 21)
    key, value = heads.view(num_rows, 2, head_dim), heads.flip(0).view(num_rows, 2, head_dim)
    rows = torch.cat([torch.zeros(num_rows, 1, head_dim), key, value], dim=1).contiguous()  # a query head first
    cos, sin = torch.ones(num_rows, head_dim), torch.zeros(num_rows, head_dim)
    query = torch.empty(num_rows, 1, head_dim)
    # Nothing is turned, but infinity times the sine would be NaN: only the last numbers are let through.
    rotary_dim = 0
    PLACE_HEADS[dtype](
        1, num_rows, rows.data_ptr(), rows.stride(0) * 4, 1, 2, head_dim, 0, 0, 0.0, cos.data_ptr(), sin.data_ptr(),
        rotary_dim, query.data_ptr(), found.layer(0).data_ptr(), 3, batch.write_pages.data_ptr(),
        batch.write_slots.data_ptr(),
    )  # fmt: skip
    expected.write(0, (batch.write_pages, batch.write_slots), key, value)
    seen, wanted = (decode(arena.tensor, dtype).float() for arena in (found, expected))
    finite = wanted.isfinite().all(dim=-1)
    assert torch.equal(finite, seen.isfinite().all(dim=-1))
    assert torch.equal(found.tensor[finite], expected.tensor[finite])
    torch.testing.assert_close(seen, wanted, rtol=0, atol=0, equal_nan=True)


def test_whole_numbers_are_near_and_use_their_range() -> None:
    heads = torch.randn(50, 64, generator=torch.Generator().manual_seed(1)) * torch.logspace(-20, 20, 50)[:, None]
    stored = encode(heads, "int8")
    assert stored.dtype is torch.int8
    assert stored.shape == (50, 64 + 4)
    assert bool((stored[:, :64].abs().amax(dim=-1) == GREATEST).all())
    greatest = heads.abs().amax(dim=-1, keepdim=True)
    assert bool(((decode(stored, "int8") - heads).abs() <= 0.5001 * greatest / GREATEST).all())


def test_heads_too_small_for_an_inverse_are_zero_and_others_are_not() -> None:
    tiny, small = torch.full((1, 16), LEAST / 2), torch.full((1, 16), LEAST)
    assert not decode(encode(tiny, "int8"), "int8").any()
    torch.testing.assert_close(decode(encode(small, "int8"), "int8"), small)


def test_what_is_not_finite_stays_so() -> None:
    for number in (INFINITE, -INFINITE, NAN):
        head = torch.ones(1, 16)
        head[0, 3] = number
        assert decode(encode(head, "int8"), "int8").isnan().all()


@pytest.mark.long
@DTYPES
def test_logits_are_the_same_bits_however_the_work_is_cut(model_dir: Path, dtype: str) -> None:
    """So the tokens of a chunk see each other as a later chunk sees them: as the pages have them."""
    prompts = [helpers.make_prompt(length, seed=index) for index, length in enumerate(helpers.PROMPT_LENGTHS)]
    engine, threaded = (helpers.load_engine(model_dir, cache_dtype=dtype, num_threads=num) for num in (1, 2))
    assert engine.layout.dtype == dtype
    assert engine.attention == "cpu"
    together = helpers.drive(engine, prompts, chunk=50, num_new=NUM_NEW)
    for prompt, expected in zip(prompts, together, strict=True):
        for one, chunk in [(engine, 7), (engine, 1000), (threaded, 33)]:
            (found,) = helpers.drive(one, [prompt], chunk=chunk, num_new=NUM_NEW)
            assert found.token_ids == expected.token_ids
            assert torch.equal(found.logits, expected.logits), f"chunks of {chunk}"


@pytest.mark.parametrize(("dtype", "far"), [("bfloat16", 0.03), ("int8", 0.1)])
def test_pages_are_smaller_and_logits_are_near(model_dir: Path, dtype: str, far: float) -> None:
    exact, found = (helpers.load_engine(model_dir, cache_dtype=name) for name in ("auto", dtype))
    assert exact.layout.dtype == "float32"
    assert (found.fused, found.linear) == (exact.fused, exact.linear)
    assert found.weights_sha256 == exact.weights_sha256
    head_dim = exact.layout.head_dim
    head_bytes = {"bfloat16": 2 * head_dim, "int8": head_dim + 4}[dtype]
    assert found.arena.num_bytes * 4 * head_dim == exact.arena.num_bytes * head_bytes
    prompt = helpers.make_prompt(100, seed=3)
    pages = range(exact.layout.num_pages_for(100))
    wanted, seen = (one.forward([SequenceInput(prompt, 0, pages, 100)]).clone() for one in (exact, found))
    error = (seen - wanted).square().mean().sqrt() / wanted.std()
    assert 0 < float(error) < far


def test_pages_are_copied_and_moved_with_their_scales(model_dir: Path) -> None:
    """As a tier, a transport and copy on write do it: bytes alone say what a page means."""
    engine, other = (helpers.load_engine(model_dir, cache_dtype="int8") for _ in range(2))
    prompt = helpers.make_prompt(40, seed=4)
    engine.forward([SequenceInput(prompt, 0, [3, 1, 2], 0)])
    expected = engine.forward([SequenceInput([7], 40, [3, 1, 2], 1)]).clone()
    engine.arena.copy_page(2, 9)
    assert torch.equal(engine.forward([SequenceInput([7], 40, [3, 1, 9], 1)]), expected)
    memory = memoryview(bytearray(engine.layout.page_bytes))
    for source, target in ((3, 5), (1, 6), (2, 4)):
        engine.arena.read_page(source, memory)
        other.arena.write_page(target, memory)
    assert torch.equal(other.forward([SequenceInput([7], 40, [5, 6, 4], 1)]), expected)


@DTYPES
def test_a_number_that_is_none_fails_its_own_sequence_only(model_dir: Path, dtype: str) -> None:
    engine = helpers.load_engine(model_dir, cache_dtype=dtype)
    good, bad = helpers.make_prompt(20, seed=5), helpers.make_prompt(21, seed=6)
    engine.forward([SequenceInput(good, 0, [0, 1], 0), SequenceInput(bad, 0, [2, 3], 0)])
    expected = engine.forward([SequenceInput([7], 20, [0, 1], 1)]).clone()
    head = torch.full((1, engine.layout.num_kv_heads, engine.layout.head_dim), NAN)
    place = torch.tensor([2]), torch.tensor([3])
    engine.arena.write(1, place, head, head)
    found = engine.forward([SequenceInput([7], 20, [0, 1], 1), SequenceInput([7], 21, [2, 3], 1)])
    assert torch.equal(found[:1], expected)
    assert found[1].isnan().any() or "qwen3" in str(model_dir)  # whose window has passed that token


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_models_that_torch_computes_have_such_pages_too(
    model_dir: Path, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem.engine.cpu.kernels.has_bfloat16_products", lambda: False)
    engine = helpers.load_engine(model_dir, dtype=dtype, cache_dtype="int8")
    assert (engine.attention, engine.layout.dtype) == ("reference", "int8")
    prompt = helpers.make_prompt(40, seed=4)
    pages = range(engine.layout.num_pages_for(41))
    found = engine.forward([SequenceInput(prompt, 0, pages, 40)])
    wanted = helpers.load_engine(model_dir, dtype=dtype).forward([SequenceInput(prompt, 0, pages, 40)])
    assert float(torch.corrcoef(torch.stack([found.flatten(), wanted.flatten()]))[0, 1]) > 0.99


def test_what_cannot_be_is_refused_by_name(model_dir: Path) -> None:
    with pytest.raises(ConfigError, match=r"cache.dtype 'int3' is not one of auto, float32, bfloat16, int8") as caught:
        helpers.load_engine(model_dir, cache_dtype="int3")
    assert caught.value.key == "cache.dtype"
    gpu = torch.device("cuda")
    assert choose_kv_dtype("bfloat16", Types.all_of("bfloat16"), gpu) == "bfloat16"
    assert choose_kv_dtype("auto", Types.all_of("float16"), gpu) == "float16"
    for dtype in ("bfloat16", "int8"):
        with pytest.raises(ConfigError, match=rf"cache.dtype is {dtype}, but on cuda .* float16; leave cache.dtype"):
            choose_kv_dtype(dtype, Types.all_of("float16"), gpu)


def test_an_engine_says_what_its_pages_hold(model_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    engine = Engine.load(model_dir, cache_dtype="bfloat16", num_pages=3, num_threads=1, probe=False)
    assert f"3 pages of 32 slots in bfloat16 ({engine.arena.num_bytes} bytes)" in caplog.text
