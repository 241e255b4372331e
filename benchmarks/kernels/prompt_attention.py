"""Attention of a prompt's chunk, by Tandem and by torch, against fused multiply-adds that find all in registers.

Each round runs the limit, Tandem and torch one after the other, so that what slows this machine meets all three. On one
thread times are those that the thread computed, else those of the wall clock; rates are those of the best rounds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils

from tandem.bench.other_load import OtherLoad
from tandem.engine.arena import KVArena
from tandem.engine.attention.reference import AttentionParams
from tandem.engine.batch import SequenceInput, build_batch
from tandem.engine.cpu import vector_ir as vir
from tandem.engine.cpu.atomics import words
from tandem.engine.cpu.threads import Kernel
from tandem.engine.layout import KVLayout
from tandem.engine.select_kernels import kernels_for

#: The project's own goal, as a share of the limit.
GOAL = 0.7

PAGE_SIZE = 32  # the configuration's default on the CPU

# Sums that do not wait for each other: more than a multiply-add takes cycles, times those that begin in each.
_NUM_SUMS = 12
_vec = vir.Vectors(16 if vir.has_wide_vectors() else 8)


@dataclass(frozen=True, slots=True)
class PromptSizes:
    """What is measured: the last `chunk` tokens of contexts of these lengths, by heads of these dimensions."""

    head_dims: tuple[int, ...] = (64, 96, 128, 256)
    contexts: tuple[int, ...] = (2_048, 8_192, 32_768)
    chunk: int = 512
    num_heads: int = 4
    num_kv_heads: int = 2
    rounds: int = 3
    limit_steps: int = 1_000_000  # of one run of the limit


@dataclass(frozen=True, slots=True)
class PromptRun:
    """Operations a second; a multiply and an add are two."""

    num_threads: int
    head_dim: int
    context: int
    limit_flop_per_s: float
    flop_per_s: float
    torch_flop_per_s: float
    other_load: float  # cores that others used meanwhile

    @property
    def share(self) -> float:
        """Of the limit."""
        return self.flop_per_s / self.limit_flop_per_s


def attention_flop(num_heads: int, head_dim: int, chunk: int, context: int) -> int:
    """Of the last `chunk` tokens of a context, each of which sees itself and all before it."""
    seen = chunk * (2 * context - chunk + 1) // 2
    return 4 * num_heads * head_dim * seen


def measure_prompts(num_threads: int, sizes: PromptSizes, tell: Callable[[str], None]) -> Iterator[PromptRun]:
    """One after the other; `tell` hears what comes next. torch keeps the number of threads."""
    torch.set_num_threads(num_threads)
    for head_dim in sizes.head_dims:
        for context in sizes.contexts:
            tell(f"attention of a prompt, head {head_dim}, context {context:,}")
            yield _measure(num_threads, head_dim, context, sizes)


def count_prompts(sizes: PromptSizes) -> int:
    """How many runs `measure_prompts` gives."""
    return len(sizes.head_dims) * len(sizes.contexts)


def _measure(num_threads: int, head_dim: int, context: int, sizes: PromptSizes) -> PromptRun:
    generator = torch.Generator().manual_seed(0)
    chunk, start = sizes.chunk, context - sizes.chunk
    num_pages = -(-context // PAGE_SIZE)
    layout = KVLayout(1, sizes.num_kv_heads, head_dim, PAGE_SIZE, "float32")
    arena = KVArena(layout, num_pages)
    table = torch.randperm(num_pages, generator=generator)
    tokens = torch.arange(context)
    key, value = torch.randn(2, context, sizes.num_kv_heads, head_dim, generator=generator)
    arena.write(0, (table[tokens // PAGE_SIZE], tokens % PAGE_SIZE), key, value)
    batch = build_batch([SequenceInput([0] * chunk, start, table.tolist())], PAGE_SIZE, arena.device)
    query = torch.randn(chunk, sizes.num_heads, head_dim, generator=generator)
    params = AttentionParams(scaling=head_dim**-0.5)
    backend = kernels_for(arena.device, num_threads).attention(layout)
    # torch has K and V without pages, and a copy of them for each query head.
    group = sizes.num_heads // sizes.num_kv_heads
    keys, values = (
        states.transpose(0, 1).repeat_interleave(group, 0)[None].contiguous() for states in (key, value)
    )
    queries = query.transpose(0, 1)[None].contiguous()
    mask = torch.ones(chunk, context, dtype=torch.bool).tril(start)
    place = torch.ones(num_threads * 2 * _vec.lanes)
    limit_flop = num_threads * sizes.limit_steps * _NUM_SUMS * _vec.lanes * 2
    flop = attention_flop(sizes.num_heads, head_dim, chunk, context)
    tasks: list[tuple[int, Callable[[], object]]] = [
        (limit_flop, lambda: _multiply_adds(num_threads, num_threads, sizes.limit_steps, place.data_ptr())),
        (flop, lambda: backend.attend(batch, arena, 0, query, params)),
        (flop, lambda: torch.nn.functional.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)),
    ]
    clock = time.thread_time if num_threads == 1 else time.perf_counter
    load, best = OtherLoad(), [0.0] * len(tasks)
    for number in range(1 + sizes.rounds):
        for index, (work, run) in enumerate(tasks):
            begin = clock()
            run()
            if number:  # the first compiles, and touches memory
                best[index] = max(best[index], work / (clock() - begin))
    return PromptRun(num_threads, head_dim, context, best[0], best[1], best[2], load.cores())


def _emit_multiply_adds(builder: ir.IRBuilder, steps: ir.Value, place: ir.Value) -> None:
    """`steps` of each sum; its factor is read from `place`, and what comes out is written behind it."""
    factor = _vec.load(builder, place)
    sums = [cgutils.alloca_once_value(builder, _vec.constant(float(n))) for n in range(_NUM_SUMS)]
    with cgutils.for_range(builder, steps):
        for one in sums:
            builder.store(_vec.fma(builder, factor, factor, builder.load(one)), one)
    total = builder.load(sums[0])
    for one in sums[1:]:
        total = builder.fadd(total, builder.load(one))
    _vec.store(builder, total, vir.offset(builder, place, _vec.num_bytes))


_chains = vir.kernel(2, 0, types.void, _emit_multiply_adds)
_two_words = words(2)
_STRIDE = 2 * _vec.num_bytes


def _multiply_add_parts(first, end, arguments):  # type: ignore[no-untyped-def] # pragma: no cover - compiled
    steps, place = _two_words(arguments)
    for part in range(first, end):
        _chains(steps, place + part * _STRIDE)


_multiply_adds = Kernel(_multiply_add_parts, "ii")
