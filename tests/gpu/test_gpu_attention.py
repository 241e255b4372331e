"""Each paged kernel of CUDA against the reference: ragged batches and fixed decode steps, over pages out of order.

All slots that no sequence has written hold NaN, so a kernel that reads one shows it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from tandem.core.errors import UnsupportedModelError
from tandem.engine.arena import KVArena
from tandem.engine.attention.reference import AttentionParams, ReferenceAttention
from tandem.engine.batch import PagedBatch, SequenceInput, build_batch
from tandem.engine.cuda import attention
from tandem.engine.cuda.decode_step import DecodeBackend, DecodeStep
from tandem.engine.layout import KVLayout

#: In float32 nothing but the order of sums differs. In 16 bits the reference computes in float32 from the same inputs,
#: so what is allowed is the rounding of weights and outputs, which are about 1 in size.
TOLERANCES = {"float32": 2e-5, "float16": 5e-3, "bfloat16": 3e-2}
FLASH_PAGE = attention.FLASH_PAGE_MULTIPLE
PARAMS = {
    "plain": AttentionParams(0.125),
    "window": AttentionParams(0.125, window=24),
    "softcap": AttentionParams(0.125, softcap=20.0),
}


@dataclass
class Paged:
    """Some sequences in an arena: as a ragged batch, and the last row of each as a decode step."""

    arena: KVArena
    batch: PagedBatch
    query: torch.Tensor
    step: DecodeStep
    last_rows: torch.Tensor

    @classmethod
    def make(cls, device: torch.device, dtype: str, page_size: int, heads: int, kv_heads: int, head_dim: int) -> Paged:
        generator = torch.Generator().manual_seed(page_size + heads)
        # (tokens before, tokens now): prompts, chunks over a prefix, single tokens; at the borders of pages and beside.
        spans = ((0, 1), (0, page_size), (2 * page_size - 1, 1), (page_size + 3, 37), (0, 70), (69, 1), (page_size, 1))
        num_pages = sum(-(-(start + num) // page_size) for start, num in spans)
        layout = KVLayout(1, kv_heads, head_dim, page_size, dtype)
        arena = KVArena(layout, num_pages, device)
        arena.tensor.fill_(float("nan"))
        free = np.random.default_rng(1).permutation(num_pages).tolist()
        sequences = []
        for start, num in spans:
            count = -(-(start + num) // page_size)
            pages, free = free[:count], free[count:]
            sequences.append(SequenceInput([0] * num, start, pages))
            for token in range(start + num):
                kv = torch.randn(2, kv_heads, head_dim, generator=generator)
                arena.tensor[0, pages[token // page_size], :, token % page_size] = kv.to(device, arena.tensor.dtype)
        batch = build_batch(sequences, page_size, device)
        # As the model hands it over: heads before tokens in memory.
        query = torch.randn(heads, batch.num_tokens, head_dim, generator=generator)
        query = query.to(device, arena.tensor.dtype).transpose(0, 1)
        step = DecodeStep(
            tables=batch.block_tables,
            used=torch.tensor([item.end for item in sequences], dtype=torch.int32, device=device),
            offsets=torch.arange(len(sequences) + 1, dtype=torch.int32, device=device),
            max_keys=batch.block_tables.shape[1] * page_size,
        )
        last_rows = torch.tensor([rows.row + rows.num_rows - 1 for rows in batch.sequences], device=device)
        return cls(arena, batch, query, step, last_rows)


def compare(backend: DecodeBackend, paged: Paged, params: AttentionParams) -> None:
    tolerance = TOLERANCES[paged.arena.layout.dtype]
    expected = ReferenceAttention().attend(paged.batch, paged.arena, 0, paged.query, params).float()
    found = backend.attend(paged.batch, paged.arena, 0, paged.query, params)
    assert found.shape == paged.query.shape
    assert found.dtype == paged.query.dtype
    assert (found.float() - expected).abs().max() <= tolerance
    single = backend.attend_decode(paged.step, paged.arena, 0, paged.query[paged.last_rows], params)
    assert (single.float() - expected[paged.last_rows]).abs().max() <= tolerance


SHAPES = [(16, 4, 2, 64), (32, 6, 2, 128), (256, 8, 1, 64), (16, 4, 4, 80), (5, 7, 1, 32)]
#: Interpreting takes seconds: but in plain float32 two shapes stand for all, and in float16 plain attention; not so in
#: `make test-faults`, and on a GPU.
SHAPES_DTYPES_AND_PARAMS = [
    pytest.param(
        *shape, dtype, params, id="-".join(map(str, (*shape, dtype, name))),
        marks=[] if (dtype, name) == ("float32", "plain") or (is_told and (dtype == "float32" or name == "plain"))
        else pytest.mark.faults,
    )
    for shape in SHAPES
    for dtype in TOLERANCES
    for name, params in PARAMS.items()
    for is_told in [shape in (SHAPES[0], SHAPES[-1])]
]  # fmt: skip


@pytest.mark.parametrize(("page_size", "heads", "kv_heads", "head_dim", "dtype", "params"), SHAPES_DTYPES_AND_PARAMS)
def test_triton(
    triton_device: torch.device,
    dtype: str,
    params: AttentionParams,
    page_size: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
) -> None:
    """In float32 this is the identity with the reference."""
    if triton_device.type == "cpu" and dtype == "bfloat16":
        pytest.skip("Triton's interpreter has no bfloat16")
    from tandem.engine.cuda.attention_triton import TritonAttention

    paged = Paged.make(triton_device, dtype, page_size, heads, kv_heads, head_dim)
    compare(TritonAttention(), paged, params)


@pytest.mark.parametrize(
    ("window", "num_processors"),
    [(24, 132), (0, 0), *(pytest.param(*each, marks=pytest.mark.faults) for each in ((24, 0), (0, 132)))],
)
def test_triton_with_sinks(
    triton_device: torch.device, window: int, num_processors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sink counts once, in however many parts a context is cut."""
    from tandem.engine.cuda import attention_triton

    monkeypatch.setattr(attention_triton, "_num_processors", lambda _: num_processors)
    paged = Paged.make(triton_device, "float32", 16, 6, 2, 64)
    sinks = torch.linspace(-3.0, 6.0, 6, device=triton_device)
    compare(attention_triton.TritonAttention(), paged, AttentionParams(0.125, window=window, sinks=sinks))


@pytest.mark.parametrize("num_processors", [0, 7, pytest.param(132, marks=pytest.mark.faults)])
def test_triton_in_any_number_of_parts(
    triton_device: torch.device, num_processors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One part; some; more than most contexts have tiles, so that some are empty."""
    from tandem.engine.cuda import attention_triton

    monkeypatch.setattr(attention_triton, "_num_processors", lambda _: num_processors)
    paged = Paged.make(triton_device, "float32", 16, 2, 1, 64)
    compare(attention_triton.TritonAttention(), paged, PARAMS["plain"])


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_flash_attn(gpu: torch.device, dtype: str, params: AttentionParams) -> None:
    pytest.importorskip("flash_attn")
    compare(attention.FlashAttention(), Paged.make(gpu, dtype, FLASH_PAGE, 4, 2, 64), params)


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_torch_varlen(gpu: torch.device, dtype: str, params: AttentionParams) -> None:
    pytest.importorskip("flash_attn_interface", reason="torch's kernel takes block tables with FlashAttention-3 only")
    pytest.importorskip("torch.nn.attention.varlen")
    attention.activate_flash_attention_3()
    backend = attention.TorchVarlenAttention()
    paged = Paged.make(gpu, dtype, 32, 4, 2, 64)
    if params.softcap:
        with pytest.raises(UnsupportedModelError, match="caps"):
            compare(backend, paged, params)
        return
    if reason := attention.refusal(backend, paged.arena.layout, gpu):
        pytest.skip(reason)
    compare(backend, paged, params)


@pytest.mark.parametrize("page_size", [16, FLASH_PAGE])
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_what_is_chosen_serves(gpu: torch.device, dtype: str, page_size: int) -> None:
    paged = Paged.make(gpu, dtype, page_size, 4, 2, 64)
    backend = attention.select_cuda_backend(paged.arena.layout, gpu)
    assert isinstance(backend, DecodeBackend), f"{backend.name} cannot be captured"
    compare(backend, paged, PARAMS["plain"])


def wrong(attend: Callable[..., torch.Tensor]) -> ReferenceAttention:
    backend = ReferenceAttention()
    backend.attend = attend  # type: ignore[method-assign]
    return backend


def test_a_kernel_that_raises_or_is_wrong_is_not_chosen(gpu: torch.device) -> None:
    layout = KVLayout(4, 2, 64, 16, "bfloat16")
    assert attention.refusal(ReferenceAttention(), layout, gpu) is None
    reason = attention.refusal(wrong(lambda *_: torch.ones(9, 4, 64, device=gpu)), layout, gpu)
    assert reason is not None
    assert "differs" in reason

    def raises(*_: object) -> torch.Tensor:
        raise RuntimeError("no block tables here")

    assert attention.refusal(wrong(raises), layout, gpu) == "RuntimeError: no block tables here"
