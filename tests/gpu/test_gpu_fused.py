"""The fused parts of CUDA against the modules that they stand for, from single kernels to the whole decoder.

Without a GPU Triton interprets the kernels (`TRITON_INTERPRET=1`). What is not known to be the same stays.
"""

from __future__ import annotations

import engine_helpers as helpers
import pytest
import torch
from torch import nn
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from tandem.engine.arena import TORCH_DTYPES, KVArena
from tandem.engine.batch import SequenceInput, build_batch
from tandem.engine.layout import KVLayout

DTYPES = ("float32", "float16", "bfloat16")
#: Of numbers of about 1 in size, computed in float32 and rounded once.
TOLERANCES = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 2e-2}
PAGE_SIZE, NUM_PAGES = helpers.PAGE_SIZE, 24


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def assert_near(found: torch.Tensor, expected: torch.Tensor, dtype: str) -> None:
    """By rows: differences are shares of the greatest number."""
    assert found.shape == expected.shape
    scale = expected.float().abs().amax(dim=-1, keepdim=True)
    difference = ((found.float() - expected.float()).abs() / scale.clamp(min=1e-30)).max()
    assert difference <= TOLERANCES[dtype], f"{difference:.1e}"


def is_cut(device: torch.device, dtype: str) -> bool:
    """Whether numbers are cut off where a GPU rounds them: Triton's interpreter does so in bfloat16."""
    return device.type == "cpu" and dtype == "bfloat16"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [8, 96, 768, 2048, 5000])
@pytest.mark.parametrize("make", [LlamaRMSNorm, Gemma2RMSNorm])
def test_norms_and_sums(triton_device: torch.device, make: type[nn.Module], width: int, dtype: str) -> None:
    from tandem.engine.cuda.layer_kernels import add_and_normalize, normalize

    norm = make(width, eps=1e-5)
    with torch.no_grad():
        norm.weight.copy_(norm.weight + 0.3 * draw(width))
    norm = norm.to(triton_device)
    scale = norm.weight if make is LlamaRMSNorm else 1.0 + norm.weight
    x, added = (draw(1, 6, width, seed=seed).to(triton_device, TORCH_DTYPES[dtype]) for seed in (1, 2))
    x[0, 1] *= 1e-3  # the epsilon counts
    x[0, 2] *= 1e3
    with torch.inference_mode():
        assert_near(normalize(x, scale, 1e-5), norm(x.float()), dtype)
        sums, normed = add_and_normalize(x, added, scale, 1e-5)
        assert_near(sums, x + added, dtype)
        if not is_cut(triton_device, dtype):
            assert torch.equal(sums, x + added)
        assert_near(normed, norm(sums.float()), dtype)
        assert [part.shape for part in add_and_normalize(x[:, :0], added[:, :0], scale, 1e-5)] == [(1, 0, width)] * 2
        across = x.transpose(0, 1).contiguous().transpose(0, 1).expand(2, 6, width)
        assert_near(normalize(across, scale, 1e-5), norm(across.float()), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [8, 1024, 1500])
def test_gates(triton_device: torch.device, width: int, dtype: str) -> None:
    from tandem.engine.cuda.layer_kernels import gate

    both = draw(1, 3, 2 * width).to(triton_device, TORCH_DTYPES[dtype])
    both[0, 1] *= 30.0  # both ends of the activation
    left, right = both.float().split(width, dim=-1)
    assert_near(gate(both), nn.functional.silu(left) * right, dtype)
    both[0, 2, 0], both[0, 2, width] = -1e4, 1.0
    assert gate(both)[0, 2, 0] == 0.0
    assert gate(both[:, :0]).shape == (1, 0, width)


@pytest.mark.parametrize("has_table", [False, True])
@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "rotary_dim", "dtype"),
    [
        # Interpreting many heads takes a second.
        pytest.param(*shape, dtype, marks=pytest.mark.faults if shape[0] == 32 and dtype != "float32" else [])
        for shape in [
            (4, 2, 64, 64), (6, 1, 96, 96), (32, 8, 128, 128), (2, 2, 256, 256), (7, 1, 80, 32), (3, 3, 16, 2)
        ]
        for dtype in DTYPES
    ],
)  # fmt: skip
def test_heads_are_turned_and_placed(
    triton_device: torch.device,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    rotary_dim: int,
    dtype: str,
    has_norms: bool,
    has_table: bool,
) -> None:
    from tandem.engine.cuda.layer_kernels import HeadShape, Rotary, place_heads

    device, type_ = triton_device, TORCH_DTYPES[dtype]
    arena = KVArena(KVLayout(2, num_kv_heads, head_dim, 4, dtype), 6, device)
    arena.tensor.fill_(float("nan"))
    sequences = [SequenceInput([0] * 5, 2, (3, 0)), SequenceInput([0], 6, (2, 5)), SequenceInput([0], 3, (1,))]
    batch = build_batch(sequences, 4, device)
    num_all = num_heads + 2 * num_kv_heads
    heads = draw(1, 7, num_all * head_dim).to(device, type_)
    table = draw(2, 40, rotary_dim, seed=1).to(device, type_)
    chosen = batch.positions[0] if has_table else torch.arange(7, device=device)
    rotary = Rotary(*table, batch.positions) if has_table else Rotary(*table[:, :7].contiguous())
    norms = (1.0 + 0.3 * draw(2, head_dim, seed=2)).to(device) if has_norms else None
    query = place_heads(
        heads, HeadShape(num_heads, num_kv_heads, head_dim, rotary_dim), rotary, norms, 1e-5, batch, arena, 1
    )

    parts = (
        heads.float().view(1, 7, num_all, head_dim).transpose(1, 2).split([num_heads, num_kv_heads, num_kv_heads], 1)
    )
    turned = []
    for index, part in enumerate(parts[:2]):
        if norms is not None:
            part = part * torch.rsqrt(part.pow(2).mean(-1, keepdim=True) + 1e-5) * norms[index]
        cos, sin = (side[chosen][None].float() for side in table)
        low, _ = apply_rotary_pos_emb(part[..., :rotary_dim], part[..., :rotary_dim], cos, sin)
        turned.append(torch.cat([low, part[..., rotary_dim:]], dim=-1)[0].transpose(0, 1))
    assert query.is_contiguous()
    assert query.dtype == type_
    assert_near(query, turned[0], dtype)
    place = batch.write_pages, batch.write_slots
    assert_near(arena.keys(1)[place], turned[1], dtype)
    assert torch.equal(arena.values(1)[place], parts[2][0].transpose(0, 1).to(type_))
    arena.keys(1)[place] = arena.values(1)[place] = float("nan")
    assert arena.tensor.isnan().all(), "only its own slots are written"
