"""The kernels that are measured: what each must do, and a function that does it once.

Each is fed as in serving: KV in scattered pages, weights and KV that are in no cache when their turn comes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from benchmarks.kernels import roofline as cost
from benchmarks.kernels.roofline import FLOAT_BYTES, ModelShape, Work
from kvtransfer.digest import digest_bytes
from tandem.core.sampling import SampleRow, SamplingParams, SequenceState
from tandem.engine.arena import KVArena
from tandem.engine.attention.reference import AttentionParams
from tandem.engine.batch import SequenceInput, build_batch
from tandem.engine.cpu.packed_linear import PackedLinear
from tandem.engine.cpu.sampler import sample_rows
from tandem.engine.cpu.vector_ir import is_fast_here
from tandem.engine.engine import Engine
from tandem.engine.layout import KVLayout
from tandem.engine.select_kernels import kernels_for

PAGE_SIZE = 32  # the configuration's default on the CPU

# The project's own goals, as shares of the limit.
_DECODE_GOALS = {1: 0.7, 8: 0.6}
_PREFILL_GOAL = 0.8
_ATTENTION_GOAL = 0.6


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is measured, and for how long each."""

    decode_batches: tuple[int, ...] = (1, 8)
    decode_context: int = 512
    prompt: int = 1024
    attention_batch: int = 16
    attention_context: int = 1536
    linear_rows: tuple[int, ...] = (1, 4, 8, 16, 512)
    matrix_size: int = 1536  # of the probes
    cold_bytes: int = 256 << 20  # of what must not come from a cache
    budget_s: float = 0.8
    probe_budget_s: float = 0.4  # twice

    @property
    def max_context(self) -> int:
        """What the model must hold."""
        return max(self.decode_context, self.prompt)


@dataclass(frozen=True, slots=True)
class Case:
    """One kernel, ready to run."""

    kind: str
    name: str
    work: Work
    run: Callable[[], object]
    goal: float | None = None


def count_cases(sizes: Sizes) -> int:
    """How many `make_cases` gives."""
    num_batches, num_others = len(sizes.decode_batches), 3  # prefill, attention, digest
    return 2 * num_batches + len(sizes.linear_rows) + num_others


def make_cases(model_dir: Path, shape: ModelShape, num_threads: int, sizes: Sizes) -> Iterator[Case]:
    """One after the other: the memory of each group is free before the next is made."""
    yield from _forwards(model_dir, shape, num_threads, sizes)
    yield _attention(shape, num_threads, sizes)
    yield from _linear_layers(shape, num_threads, sizes)
    for batch in sizes.decode_batches:
        yield _sampling(shape, batch)
    yield _digest(shape, sizes)


def describe(shape: ModelShape) -> str:
    """What the short names of the cases leave out."""
    inputs, outputs = shape.largest_linear
    extent_kib = PAGE_SIZE * shape.kv_token_bytes / 1024
    return (
        "attention: paged, one new token for each sequence, one layer; "
        f"linear: {inputs:,} → {outputs:,}, weights from memory; "
        f"digest: extents of {extent_kib:g} KiB, by one thread"
    )


def _forwards(model_dir: Path, shape: ModelShape, num_threads: int, sizes: Sizes) -> Iterator[Case]:
    """Whole steps of the engine, as a worker runs them."""
    num_sequences, context = max(sizes.decode_batches), sizes.decode_context
    pages_each = -(-sizes.max_context // PAGE_SIZE)
    engine = Engine.load(
        model_dir, dtype="float32", page_size=PAGE_SIZE, num_pages=num_sequences * pages_each,
        num_threads=num_threads, probe=False,  # the speed of a model does not hang on it
    )  # fmt: skip
    _fill(engine.arena)
    tables = _scattered(num_sequences, pages_each)
    for batch in sizes.decode_batches:
        step = [SequenceInput([0], context - 1, table) for table in tables[:batch]]
        yield Case(
            "decode",
            f"decode, batch {batch}, context {context:,}",
            cost.decode_step(shape, batch, context),
            lambda step=step: engine.forward(step),  # type: ignore[misc]
            _DECODE_GOALS.get(batch),
        )
    tokens = np.random.default_rng(0).integers(0, shape.vocab_size, sizes.prompt).tolist()
    prompt = [SequenceInput(tokens, 0, tables[0])]
    yield Case(
        "prefill",
        f"prefill, {sizes.prompt:,} tokens",
        cost.prefill(shape, sizes.prompt),
        lambda: engine.forward(prompt),
        _PREFILL_GOAL,
    )


def _attention(shape: ModelShape, num_threads: int, sizes: Sizes) -> Case:
    """Decode attention of one layer; layers take turns."""
    batch, context = sizes.attention_batch, sizes.attention_context
    arena, tables = scattered_pages(shape, batch, context, sizes.cold_bytes)
    rows = build_batch([SequenceInput([0], context - 1, table) for table in tables], PAGE_SIZE, arena.device)
    backend = kernels_for(arena.device, num_threads).attention(arena.layout)
    query = torch.randn(batch, shape.num_heads, shape.head_dim, generator=_generator())
    params = AttentionParams(scaling=shape.head_dim**-0.5)
    layers = itertools.cycle(range(arena.layout.num_layers))
    return Case(
        "attention",
        f"attention, {batch} × {context:,} tokens",
        cost.decode_attention(shape, batch, context),
        lambda: backend.attend(rows, arena, next(layers), query, params),
        _ATTENTION_GOAL,
    )


def scattered_pages(
    shape: ModelShape, num_sequences: int, num_tokens: int, cold_bytes: int
) -> tuple[KVArena, list[list[int]]]:
    """Pages of so many layers that they are `cold_bytes` together, written, and block tables in no order."""
    pages_each = -(-num_tokens // PAGE_SIZE)
    layer_bytes = num_sequences * pages_each * PAGE_SIZE * shape.kv_token_bytes
    layout = KVLayout(-(-cold_bytes // layer_bytes), shape.num_kv_heads, shape.head_dim, PAGE_SIZE, "float32")
    arena = KVArena(layout, num_sequences * pages_each)
    _fill(arena)
    return arena, _scattered(num_sequences, pages_each)


def _linear_layers(shape: ModelShape, num_threads: int, sizes: Sizes) -> Iterator[Case]:
    """The largest linear layer of the model, for several numbers of rows; copies of it take turns."""
    inputs, outputs = shape.largest_linear
    num_copies = -(-sizes.cold_bytes // (inputs * outputs * FLOAT_BYTES))
    weight = torch.randn(outputs, inputs, generator=_generator())
    copies = [_linear_layer(weight, num_threads) for _ in range(num_copies)]
    layers = itertools.cycle(copies)
    for num_rows in sizes.linear_rows:
        rows = torch.randn(num_rows, inputs, generator=_generator())
        yield Case(
            "linear",
            f"linear, {num_rows} row{'s' if num_rows > 1 else ''}",
            cost.linear(num_rows, inputs, outputs),
            lambda rows=rows: next(layers)(rows),  # type: ignore[misc]
        )


def _linear_layer(weight: torch.Tensor, num_threads: int) -> torch.nn.Module:
    """Packed where this CPU has the kernels for it, as in the engine, but never as one product with another layer."""
    if is_fast_here():
        return PackedLinear(weight, None, num_threads)
    outputs, inputs = weight.shape
    layer = torch.nn.Linear(inputs, outputs, bias=False)
    layer.weight = torch.nn.Parameter(weight.clone(), requires_grad=False)
    return layer


def _sampling(shape: ModelShape, batch: int) -> Case:
    logits = torch.randn(batch, shape.vocab_size, generator=_generator())
    rows = [SampleRow(SequenceState(()), SamplingParams(temperature=0.0)) for _ in range(batch)]
    return Case(
        "sampling",
        f"sampling, greedy, batch {batch}",
        cost.greedy_sampling(batch, shape.vocab_size),
        lambda: sample_rows(logits, rows),
    )


def _digest(shape: ModelShape, sizes: Sizes) -> Case:
    """Extents, each page of a layer, taken in turn by one thread."""
    extent_bytes = PAGE_SIZE * shape.kv_token_bytes
    memory = np.ones(-(-sizes.cold_bytes // extent_bytes) * extent_bytes, dtype=np.uint8)
    extents = itertools.cycle(extent.data for extent in memory.reshape(-1, extent_bytes))
    return Case(
        "digest",
        "digest (xxh3)",
        cost.digest(extent_bytes),
        lambda: digest_bytes(next(extents)),
    )


def _fill(arena: KVArena) -> None:
    """Untouched pages would all be the same page of zeros, which is always in a cache."""
    arena.tensor.normal_(generator=_generator())


def _scattered(num_sequences: int, pages_each: int) -> list[list[int]]:
    """Block tables over all pages, in no order."""
    order = np.random.default_rng(0).permutation(num_sequences * pages_each)
    tables: list[list[int]] = order.reshape(num_sequences, pages_each).tolist()
    return tables


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)
