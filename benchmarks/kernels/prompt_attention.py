"""Attention of a prompt's chunk, by Tandem and by torch, against fused multiply-adds that find all in registers.

Limit, Tandem and torch run in turn, so that what slows this machine meets all three.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from benchmarks.kernels.multiply_adds import MultiplyAdds
from benchmarks.timing import rates_in_turn
from tandem.bench.other_load import OtherLoad
from tandem.engine.arena import KVArena
from tandem.engine.attention.reference import AttentionParams
from tandem.engine.batch import SequenceInput, build_batch
from tandem.engine.layout import KVLayout
from tandem.engine.select_kernels import kernels_for

#: The project's own goal, as a share of the limit.
GOAL = 0.7

PAGE_SIZE = 32  # the configuration's default on the CPU


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
    keys, values = (states.transpose(0, 1).repeat_interleave(group, 0)[None].contiguous() for states in (key, value))
    queries = query.transpose(0, 1)[None].contiguous()
    mask = torch.ones(chunk, context, dtype=torch.bool).tril(start)
    limit = MultiplyAdds(num_threads, sizes.limit_steps)
    flop = attention_flop(sizes.num_heads, head_dim, chunk, context)
    load = OtherLoad()
    best = rates_in_turn(
        [
            (limit.flop, limit.run),
            (flop, lambda: backend.attend(batch, arena, 0, query, params)),
            (flop, lambda: torch.nn.functional.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)),
        ],
        sizes.rounds,
        num_threads,
    )
    return PromptRun(num_threads, head_dim, context, best[0], best[1], best[2], load.cores())
