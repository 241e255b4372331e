"""What lies between the products of a decoder layer, as a few Triton kernels for CUDA.

Each goes through its input once and computes in float32, whatever the type of the tensors. Rows are tokens, and no
row's result depends on another. Nothing is read on the host, so all of it can be captured into a graph.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from tandem.engine.arena import KVArena
from tandem.engine.batch import PagedBatch

#: The widest row that one program normalises: 16 warps hold 32 numbers a thread.
WIDEST_NORM = 16_384
#: Numbers that one program takes of a gated row, or of the heads of a token: 16 bytes a thread in 16 bits.
_GATED_BLOCK = 1024
_HEADS_BLOCK = 1024


@triton.jit  # type: ignore[untyped-decorator]
def _norm_kernel(  # type: ignore[no-untyped-def]  # Triton would look the types up
    x, added, scale, sums, output, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr, HAS_ADDED: tl.constexpr,
):  # fmt: skip
    """One row: `x + added`, rounded as it is kept, and its norm."""
    begin = tl.program_id(0).to(tl.int64) * WIDTH
    column = tl.arange(0, BLOCK)
    is_column = column < WIDTH
    row = tl.load(x + begin + column, mask=is_column, other=0.0).to(tl.float32)
    if HAS_ADDED:
        row += tl.load(added + begin + column, mask=is_column, other=0.0).to(tl.float32)
        rounded = row.to(x.dtype.element_ty)
        tl.store(sums + begin + column, rounded, mask=is_column)
        row = rounded.to(tl.float32)
    factor = tl.rsqrt(tl.sum(row * row, 0) / WIDTH + eps)
    result = row * factor * tl.load(scale + column, mask=is_column, other=0.0)
    tl.store(output + begin + column, result.to(output.dtype.element_ty), mask=is_column)


@triton.jit  # type: ignore[untyped-decorator]
def _gate_kernel(  # type: ignore[no-untyped-def]
    both, output, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A piece of one row `[gate | up]`: `silu(gate) * up`."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = column < WIDTH
    gate = tl.load(both + row * 2 * WIDTH + column, mask=is_column, other=0.0).to(tl.float32)
    up = tl.load(both + (row * 2 + 1) * WIDTH + column, mask=is_column, other=0.0).to(tl.float32)
    result = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(output + row * WIDTH + column, result.to(output.dtype.element_ty), mask=is_column)


# Each is a row of one tensor, and aligned where the tokens are even in number: one variant must do for all batches.
@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize_on_alignment=("rotary_rows", "write_pages", "write_slots")
)
def _place_kernel(  # type: ignore[no-untyped-def]
    heads, query, pages, cos, sin, rotary_rows, norms, eps, write_pages, write_slots,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, ROTARY_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, HAS_NORMS: tl.constexpr,
    HAS_TABLE: tl.constexpr,
):  # fmt: skip
    """Some heads of one token, of `[queries | keys | values]`: normed, turned, and put where they belong."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    dim = tl.arange(0, BLOCK_DIM)
    is_value = head >= NUM_HEADS + NUM_KV_HEADS
    is_here = (head < NUM_HEADS + 2 * NUM_KV_HEADS)[:, None] & (dim < HEAD_DIM)[None, :]
    # A number is turned with its partner, half of what is turned apart.
    is_low = dim < ROTARY_DIM // 2
    partner = tl.where(is_low, dim + ROTARY_DIM // 2, dim - ROTARY_DIM // 2)
    is_turned = ~is_value[:, None] & (dim < ROTARY_DIM)[None, :]

    line = heads + (token * (NUM_HEADS + 2 * NUM_KV_HEADS) + head)[:, None] * HEAD_DIM
    own = tl.load(line + dim[None, :], mask=is_here, other=0.0).to(tl.float32)
    other = tl.load(line + partner[None, :], mask=is_turned, other=0.0).to(tl.float32)
    if HAS_NORMS:  # `[2, HEAD_DIM]`: of queries, of keys
        factor = tl.rsqrt(tl.sum(own * own, 1) / HEAD_DIM + eps)[:, None]
        norm = norms + tl.where(head < NUM_HEADS, 0, HEAD_DIM)[:, None]
        own_scale = tl.load(norm + dim[None, :], mask=is_here & ~is_value[:, None], other=0.0)
        own = tl.where(is_value[:, None], own, own * factor * own_scale)
        other = other * factor * tl.load(norm + partner[None, :], mask=is_turned, other=0.0)
    rotary_row = token
    if HAS_TABLE:
        rotary_row = tl.load(rotary_rows + token)
    at = rotary_row * ROTARY_DIM + dim
    cosine = tl.load(cos + at, mask=dim < ROTARY_DIM, other=0.0).to(tl.float32)
    sine = tl.load(sin + at, mask=dim < ROTARY_DIM, other=0.0).to(tl.float32)
    turned = own * cosine[None, :] + other * tl.where(is_low, -sine, sine)[None, :]
    result = tl.where(is_turned, turned, own).to(query.dtype.element_ty)

    is_query = (head < NUM_HEADS)[:, None]
    tl.store(query + (token * NUM_HEADS + head)[:, None] * HEAD_DIM + dim[None, :], result, mask=is_here & is_query)
    # A page is `[K|V][slot][kv_head][dim]`.
    page = tl.load(write_pages + token)
    slot = tl.load(write_slots + token)
    kv_head = head - NUM_HEADS
    kv_head = tl.where(is_value, kv_head - NUM_KV_HEADS, kv_head)
    slots = (page * 2 + tl.where(is_value, 1, 0)) * PAGE_SIZE + slot
    target = pages + (slots * NUM_KV_HEADS + kv_head)[:, None] * HEAD_DIM
    tl.store(target + dim[None, :], result.to(pages.dtype.element_ty), mask=is_here & ~is_query)


def normalize(x: torch.Tensor, scale: torch.Tensor, eps: float) -> torch.Tensor:
    """`x / sqrt(mean(x ** 2) + eps) * scale` of each row; `[..., width]`, `scale` is float32."""
    x = x.contiguous()
    output = torch.empty_like(x)
    _launch_norm(x, None, scale, eps, None, output)
    return output


def add_and_normalize(
    x: torch.Tensor, added: torch.Tensor, scale: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`x + added`, in their type, and its norm as of `normalize`; `[..., width]`, without gaps."""
    sums, output = torch.empty_like(x), torch.empty_like(x)
    _launch_norm(x, added, scale, eps, sums, output)
    return sums, output


def _launch_norm(
    x: torch.Tensor,
    added: torch.Tensor | None,
    scale: torch.Tensor,
    eps: float,
    sums: torch.Tensor | None,
    output: torch.Tensor,
) -> None:
    width = x.shape[-1]
    num_rows = output.numel() // width
    if not num_rows:  # a chunk whose logits nobody wants
        return
    block = triton.next_power_of_2(width)
    # What is not given is never read.
    _norm_kernel[(num_rows,)](
        x, x if added is None else added, scale, x if sums is None else sums, output, eps,
        WIDTH=width, BLOCK=block, HAS_ADDED=added is not None, num_warps=min(16, max(1, block // 256)),
    )  # fmt: skip


def gate(both: torch.Tensor) -> torch.Tensor:
    """`silu(gate) * up` of rows `[..., gate | up]` without gaps."""
    width = both.shape[-1] // 2
    output = both.new_empty(*both.shape[:-1], width)
    num_rows = output.numel() // width
    if num_rows:  # else a chunk whose logits nobody wants
        grid = num_rows, triton.cdiv(width, _GATED_BLOCK)
        _gate_kernel[grid](both, output, WIDTH=width, BLOCK=_GATED_BLOCK)
    return output


@dataclass(frozen=True, slots=True)
class Rotary:
    """Cosines and sines: row t of `[T, rotary_dim]` is of token t, or a table's row `rows[t]` (int64)."""

    cos: torch.Tensor
    sin: torch.Tensor
    rows: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class HeadShape:
    """How the heads of a token lie: `[queries | keys | values]`, of which `rotary_dim` numbers each are turned."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int


def place_heads(
    heads: torch.Tensor,
    shape: HeadShape,
    rotary: Rotary,
    norms: torch.Tensor | None,
    eps: float,
    batch: PagedBatch,
    arena: KVArena,
    layer: int,
) -> torch.Tensor:
    """Write K and V to the pages; return the queries, `[T, num_heads, head_dim]` without gaps.

    Args:
        heads: `[1, T, (num_heads + 2 * num_kv_heads) * head_dim]` without gaps.
        norms: float32 `[2, head_dim]`, by which heads of queries and of keys are normed first; or none.
    """
    num_tokens = batch.num_tokens
    query = heads.new_empty(num_tokens, shape.num_heads, shape.head_dim)
    num_heads = shape.num_heads + 2 * shape.num_kv_heads
    block_dim = triton.next_power_of_2(shape.head_dim)
    block_heads = min(triton.next_power_of_2(num_heads), max(1, _HEADS_BLOCK // block_dim))
    _place_kernel[(num_tokens, triton.cdiv(num_heads, block_heads))](
        heads, query, arena.layer(layer), rotary.cos, rotary.sin, rotary.cos if rotary.rows is None else rotary.rows,
        rotary.cos if norms is None else norms, eps, batch.write_pages, batch.write_slots,
        NUM_HEADS=shape.num_heads, NUM_KV_HEADS=shape.num_kv_heads, HEAD_DIM=shape.head_dim, BLOCK_DIM=block_dim,
        BLOCK_HEADS=block_heads, ROTARY_DIM=shape.rotary_dim, PAGE_SIZE=arena.layout.page_size,
        HAS_NORMS=norms is not None, HAS_TABLE=rotary.rows is not None,
    )  # fmt: skip
    return query
