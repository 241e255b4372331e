"""The kernels agree with the plain reference on any shape, and read nothing but what a query may see."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from engine_helpers import REPOSITORY, environment_without_wide_vectors
from transformers import AutoConfig

from tandem.core.errors import UnsupportedModelError
from tandem.engine.arena import KVArena
from tandem.engine.attention.interface import ForwardContext, current_forward, paged_attention
from tandem.engine.attention.reference import AttentionParams, ReferenceAttention
from tandem.engine.batch import PagedBatch, SequenceInput, build_batch
from tandem.engine.cpu.attention import CPUAttention
from tandem.engine.cpu.attention_kernel import ATTEND, row_blocks
from tandem.engine.cpu.vector_ir import has_bfloat16_products, has_bfloat16_tiles, has_wide_vectors
from tandem.engine.cuda.attention import refusal
from tandem.engine.cuda.decode_step import DecodeStep
from tandem.engine.fuse.small_model import has_sinks
from tandem.engine.layout import KVLayout
from tandem.engine.loader import Types
from tandem.engine.select_kernels import kernels_for

# heads, KV heads, head_dim, page size
SHAPES = [
    (1, 1, 8, 1), (8, 2, 128, 16), (4, 4, 72, 16), (4, 2, 16, 5), (6, 1, 40, 16), (8, 8, 64, 32), (12, 4, 80, 7),
    (10, 2, 24, 32), (24, 12, 32, 16),
]  # fmt: skip
#: Ways to multiply bfloat16 as it is, and what they need.
SHORT_WAYS = {
    "bfloat16 by two": pytest.mark.skipif(not has_bfloat16_products(), reason="this CPU multiplies no bfloat16"),
    "bfloat16 in tiles": pytest.mark.skipif(not has_bfloat16_tiles(), reason="this CPU has no tiles of bfloat16"),
}
#: Of heads and pages that fill tiles: some for which the heads of a row alone take a vector, two or a part of one.
SHORT_SHAPES = [
    (8, 2, 128, 16), (8, 8, 64, 32), (24, 12, 32, 16), (12, 4, 64, 32), (32, 2, 96, 48), (3, 1, 32, 16),
    (40, 20, 64, 32), (20, 1, 256, 16), (5, 5, 32, 128),
]  # fmt: skip
WAYS = [pytest.param(shape, dtype, id=f"{shape}-{dtype}") for dtype in ATTEND for shape in SHAPES] + [
    pytest.param(shape, way, id=f"{shape}-{way}", marks=needs)
    for way, needs in SHORT_WAYS.items()
    for shape in SHORT_SHAPES
]  # fmt: skip
# Of each of them shapes of which several KV heads go to a vector, and one whose heads fill more than one.
ODD_SHAPES = (12, 4, 64, 32), (5, 5, 32, 128), (20, 1, 256, 16)
ODD_WAYS = [way for way in WAYS if way.values[1] in SHORT_WAYS and way.values[0] in ODD_SHAPES]
WINDOWS = [0, 1, 2, 7, 33, 10_000]
SOFTCAPS = [0.0, 3.0]
# start and end of each sequence: decode rows at page edges, chunks with and without a prefix.
SPANS = [(0, 1), (1, 2), (31, 32), (32, 33), (63, 65), (0, 40), (40, 90), (7, 9), (200, 201), (3, 300)]


def ragged(layout: KVLayout, spans: list[tuple[int, int]], seed: int) -> tuple[KVArena, PagedBatch]:
    """Return an arena where all that these sequences may read is random, and all else NaN."""
    generator = np.random.default_rng(seed)
    counts = [layout.num_pages_for(end) for _, end in spans]
    arena = KVArena(layout, sum(counts) + 3)
    arena.tensor.view(torch.uint8).fill_(0xFF)  # NaN, also as a scale
    free = generator.permutation(arena.num_pages).tolist()
    inputs = []
    for (start, end), count in zip(spans, counts, strict=True):
        pages, free = free[:count], free[count:]
        inputs.append(SequenceInput([0] * (end - start), start, pages, 0))
        tokens = np.arange(end)
        place = (
            torch.from_numpy(np.array(pages)[tokens // layout.page_size]),
            torch.from_numpy(tokens % layout.page_size),
        )
        numbers = generator.standard_normal((2, end, layout.num_kv_heads, layout.head_dim), dtype=np.float32)
        key, value = torch.from_numpy(numbers)
        arena.write(0, place, key, value)
    return arena, build_batch(inputs, layout.page_size, torch.device("cpu"))


def attention(way: str, num_threads: int) -> CPUAttention:
    return CPUAttention(num_threads, way.removeprefix("bfloat16 ") if way in SHORT_WAYS else "")


def pages_of(way: str) -> str:
    return "bfloat16" if way in SHORT_WAYS else way


def assert_same_bits(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Of zeros the sign, too."""
    assert torch.equal(found.contiguous().view(torch.int32), expected.contiguous().view(torch.int32))


def sinks_of(heads: int) -> torch.Tensor:
    """Below, among and above the scores; of one head it counts for nothing."""
    sinks = torch.linspace(-3.0, 6.0, heads)
    sinks[heads // 2] = -torch.inf
    return sinks


@pytest.mark.long
@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize(("shape", "way"), WAYS)
def test_cpu_attention_matches_reference(shape: tuple[int, int, int, int], num_threads: int, way: str) -> None:
    """Weights that are bfloat16 have 8 bits, and those of a context of 200 tokens are off by 2 ** -9 each."""
    heads, kv_heads, head_dim, page_size = shape
    layout = KVLayout(1, kv_heads, head_dim, page_size, pages_of(way))
    far, far_on_average = (0.01, 5e-4) if way in SHORT_WAYS else (1e-5, 1e-6)
    arena, batch = ragged(layout, SPANS, seed=heads)
    query = torch.randn(batch.num_tokens, heads, head_dim, generator=torch.Generator().manual_seed(0))
    if way in SHORT_WAYS:
        query = query.bfloat16().float()
    # What a row sees is found by the same code for all types of numbers.
    is_whole = way == "float32" or way in SHORT_WAYS
    asked = itertools.product(WINDOWS, SOFTCAPS) if is_whole else [(0, 0.0), (7, 3.0), (33, 0.0)]
    for index, (window, softcap) in enumerate(asked):
        sinks = sinks_of(heads) if index % 3 else None
        params = AttentionParams(scaling=0.7 * head_dim**-0.5, window=window, softcap=softcap, sinks=sinks)
        expected = ReferenceAttention().attend(batch, arena, 0, query, params)
        found = attention(way, num_threads).attend(batch, arena, 0, query, params)
        assert bool(expected.isfinite().all())
        error = (found - expected).abs()
        assert float(error.max()) <= far, (window, softcap)
        assert float(error.mean()) <= far_on_average, (window, softcap)


@pytest.mark.processes
@pytest.mark.skipif(not has_wide_vectors(), reason="this CPU has no AVX-512: all tests are of the code without")
def test_the_code_for_shorter_vectors_agrees_with_the_reference_too() -> None:
    chosen = "test_cpu_attention_matches_reference or test_rows_do_not_depend"
    program = (
        "import sys, pytest; from tandem.engine.cpu.vector_ir import has_wide_vectors; assert not has_wide_vectors(); "
        "sys.exit(pytest.main(sys.argv[1:]))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program, "-q", "-k", chosen, __file__],
        env=environment_without_wide_vectors(), cwd=REPOSITORY, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert f"{4 * len(ATTEND) * len(SHAPES)} passed" in ended.stdout


def test_heads_that_fill_no_vectors_take_the_reference() -> None:
    device = torch.device("cpu")
    assert kernels_for(device).attention(KVLayout(1, 2, 24, 32, "float32")).name == "cpu"
    assert kernels_for(device).attention(KVLayout(1, 2, 20, 32, "float32")).name == "reference"


def test_queries_of_fewer_bits_take_the_reference_whatever_pages_hold() -> None:
    layout, kernels = KVLayout(1, 2, 24, 32, "bfloat16"), kernels_for(torch.device("cpu"))
    assert kernels.attention(layout, Types.all_of("float32")).name == "cpu"
    assert kernels.attention(layout, Types.all_of("bfloat16")).name == "reference"
    assert kernels.attention(layout).name == "reference"


def test_reference_is_what_softmax_says() -> None:
    """One query at a time, in float64, straight from the definition."""
    layout = KVLayout(1, 2, 16, 5, "float32")
    arena, batch = ragged(layout, SPANS, seed=1)
    query = torch.randn(batch.num_tokens, 4, 16, generator=torch.Generator().manual_seed(0))
    sinks = sinks_of(4)
    params = AttentionParams(scaling=0.3, window=9, softcap=2.0, sinks=sinks)
    found = ReferenceAttention().attend(batch, arena, 0, query, params)
    for rows in batch.sequences:
        table = batch.block_tables[rows.index]
        for offset in range(rows.num_rows):
            position = rows.start + offset
            tokens = range(max(0, position - 8), position + 1)
            kv = torch.stack([arena.tensor[0, table[token // 5], :, token % 5] for token in tokens]).double()
            for head in range(4):
                scores = kv[:, 0, head // 2] @ query[rows.row + offset, head].double() * 0.3
                powers = torch.exp(2.0 * torch.tanh(scores / 2.0))
                weights = powers / (powers.sum() + torch.exp(sinks[head].double()))
                expected = weights @ kv[:, 1, head // 2]
                assert float((found[rows.row + offset, head] - expected).abs().max()) < 1e-5


@pytest.mark.parametrize(("shape", "way"), WAYS)
def test_rows_do_not_depend_on_company_or_threads(shape: tuple[int, int, int, int], way: str) -> None:
    heads, kv_heads, head_dim, page_size = shape
    arena, batch = ragged(KVLayout(1, kv_heads, head_dim, page_size, pages_of(way)), SPANS, seed=2)
    query = torch.randn(batch.num_tokens, heads, head_dim, generator=torch.Generator().manual_seed(0))
    params = AttentionParams(scaling=0.2, sinks=sinks_of(heads))
    together = attention(way, 2).attend(batch, arena, 0, query, params)
    for rows in batch.sequences:
        pages = batch.block_tables[rows.index].tolist()
        alone = build_batch([SequenceInput([0] * rows.num_rows, rows.start, pages, 0)], page_size, torch.device("cpu"))
        chunk = slice(rows.row, rows.row + rows.num_rows)
        for num_threads in (1, 2):  # on two the KV heads of so few blocks are shared out
            found = attention(way, num_threads).attend(alone, arena, 0, query[chunk], params)
            assert_same_bits(found, together[chunk])


@pytest.mark.long
@pytest.mark.parametrize(("shape", "way"), WAYS)
def test_rows_do_not_depend_on_how_a_chunk_is_cut(shape: tuple[int, int, int, int], way: str) -> None:
    heads, kv_heads, head_dim, page_size = shape
    arena, batch = ragged(KVLayout(1, kv_heads, head_dim, page_size, pages_of(way)), SPANS, seed=heads)
    query = torch.randn(batch.num_tokens, heads, head_dim, generator=torch.Generator().manual_seed(0))
    for window, softcap in ((0, 0.0), (33, 3.0)):
        params = AttentionParams(scaling=0.7 * head_dim**-0.5, window=window, softcap=softcap)
        whole = attention(way, 1).attend(batch, arena, 0, query, params)
        for lengths in ((1,), (3, 5, 1), (17,)):
            pieces = []
            for rows in batch.sequences:
                pages, begin = batch.block_tables[rows.index].tolist(), rows.start
                for length in itertools.cycle(lengths):
                    end = min(begin + length, rows.end)
                    pieces.append(SequenceInput([0] * (end - begin), begin, pages, 0))
                    if end == rows.end:
                        break
                    begin = end
            cut = build_batch(pieces, page_size, torch.device("cpu"))
            assert_same_bits(attention(way, 2).attend(cut, arena, 0, query, params), whole)


@pytest.mark.parametrize("group", [1, 2, 3, 7, 17, 71])
def test_blocks_hold_each_row_once(group: int) -> None:
    for num_rows in range(1, 300):
        blocks = row_blocks([(4, 10, num_rows, 1_000), (5, 10 + num_rows, 1, 7)], group).tolist()
        rows = [row + done for _, row, count, _ in blocks for done in range(count)]
        assert rows == list(range(10, 10 + num_rows + 1))
        assert all(position - row == 990 for table, row, _, position in blocks if table == 4)
        assert blocks[-1] == [5, 10 + num_rows, 1, 7]


@pytest.mark.parametrize("num_rows", [1, 64])
@pytest.mark.parametrize("part", [0, 1], ids=["key", "value"])
@pytest.mark.parametrize(("shape", "way"), [((6, 2, 16, 16), "float32"), *ODD_WAYS])
def test_a_row_meets_nothing_of_what_only_others_of_its_chunk_see(
    shape: tuple[int, int, int, int], way: str, part: int, num_rows: int
) -> None:
    heads, kv_heads, head_dim, page_size = shape
    layout, window, spoilt = KVLayout(1, kv_heads, head_dim, page_size, pages_of(way)), 9, 20
    arena, batch = ragged(layout, [(0, 64)], seed=3)
    table = batch.block_tables[0].tolist()
    pieces = [SequenceInput([0] * num_rows, start, table, 0) for start in range(0, 64, num_rows)]
    cut = build_batch(pieces, layout.page_size, torch.device("cpu"))
    query = torch.randn(64, heads, head_dim, generator=torch.Generator().manual_seed(0))
    params = AttentionParams(scaling=0.3, window=window)
    clean = attention(way, 1).attend(cut, arena, 0, query, params)
    arena.tensor[0, table[spoilt // page_size], part, spoilt % page_size] = torch.nan
    found = attention(way, 1).attend(cut, arena, 0, query, params)
    see_it = slice(spoilt, spoilt + window)
    assert bool(found[see_it].isnan().all())
    assert_same_bits(found[:spoilt], clean[:spoilt])
    assert_same_bits(found[see_it.stop :], clean[see_it.stop :])


@pytest.mark.parametrize("num_rows", [1, 3, 64])
@pytest.mark.parametrize(("shape", "way"), ODD_WAYS)
def test_values_that_are_not_finite_leave_no_number_to_those_who_see_them(
    shape: tuple[int, int, int, int], way: str, num_rows: int
) -> None:
    """Of several units of slots, in either half of one, of one KV head, and of one number of it."""
    heads, kv_heads, head_dim, page_size = shape
    arena, batch = ragged(KVLayout(1, kv_heads, head_dim, page_size, pages_of(way)), [(0, 210)], seed=4)
    table = batch.block_tables[0].tolist()
    pieces = [SequenceInput([0] * min(num_rows, 210 - at), at, table, 0) for at in range(0, 210, num_rows)]
    cut = build_batch(pieces, page_size, torch.device("cpu"))
    query = torch.randn(210, heads, head_dim, generator=torch.Generator().manual_seed(0))
    group = heads // kv_heads
    for window in (0, 40):
        params = AttentionParams(scaling=0.3, window=window)
        clean = attention(way, 1).attend(cut, arena, 0, query, params)
        for slot, kv_head, number, value in (
            (20, 0, 3, torch.nan), (50, kv_heads - 1, head_dim - 1, torch.inf), (150, kv_heads // 2, 0, -torch.inf),
        ):  # fmt: skip
            place = arena.tensor[0, table[slot // page_size], 1, slot % page_size, kv_head]
            before, place[number] = place[number].clone(), value
            found = attention(way, 1).attend(cut, arena, 0, query, params)
            place[number] = before
            see_it = torch.zeros(210, heads, dtype=torch.bool)
            see_it[slot : slot + window if window else 210, kv_head * group : (kv_head + 1) * group] = True
            assert bool(found[see_it].isnan().all())
            assert_same_bits(found[~see_it], clean[~see_it])


@pytest.mark.parametrize(("shape", "way"), ODD_WAYS)
def test_scores_may_be_large(shape: tuple[int, int, int, int], way: str) -> None:
    """Beside a sink that counts for nothing, rows of a chunk and rows alone have the same bits, too."""
    heads, kv_heads, head_dim, page_size = shape
    arena, batch = ragged(KVLayout(1, kv_heads, head_dim, page_size, pages_of(way)), [(0, 210)], seed=5)
    table = batch.block_tables[0].tolist()
    alone = build_batch([SequenceInput([0], at, table, 0) for at in range(210)], page_size, torch.device("cpu"))
    query = torch.randn(210, heads, head_dim, generator=torch.Generator().manual_seed(0)).bfloat16().float()
    for scaling in (1e9, 1e20):
        params = AttentionParams(scaling=scaling, window=33, sinks=torch.full((heads,), -1e38))
        found = attention(way, 1).attend(batch, arena, 0, query, params)
        assert_same_bits(attention(way, 1).attend(alone, arena, 0, query, params), found)
        expected = ReferenceAttention().attend(batch, arena, 0, query, params)
        # Of two scores that are nearly equal the kernels may find the other one the greater.
        assert float(((found - expected).abs() < 0.01).float().mean()) > 0.98


class _Module(torch.nn.Module):
    layer_idx = 0


def _call(module: torch.nn.Module | None = None, kv_heads: int = 2, **kwargs: object) -> torch.Tensor:
    layout = KVLayout(1, 2, 8, 4, "float32")
    batch = build_batch([SequenceInput([0, 0, 0], 0, [1], 0)], 4, torch.device("cpu"))
    context = ForwardContext(batch, KVArena(layout, 2), ReferenceAttention())
    token = current_forward.set(context)
    try:
        states = [torch.randn(1, heads, 3, 8) for heads in (4, kv_heads, kv_heads)]
        mask = kwargs.pop("attention_mask", None)
        return paged_attention(module or _Module(), *states, mask, **kwargs)[0]  # type: ignore[arg-type]
    finally:
        current_forward.reset(token)


def test_attention_function_returns_rows() -> None:
    assert _call(scaling=0.1, position_ids=torch.zeros(1), output_router_logits=False).shape == (1, 3, 4, 8)


@pytest.mark.parametrize(
    ("kwargs", "reason"),
    [
        ({"attention_mask": torch.zeros(1, 1, 3, 3)}, "mask of its own"),
        ({"is_causal": False}, "not causal"),
        ({"dropout": 0.1}, "dropout"),
        ({"s_aux": torch.zeros(3)}, "sinks of shape"),
        ({"head_mask": torch.zeros(4)}, "head_mask"),
        ({"kv_heads": 1}, "KV layout"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_attention_refuses_what_it_does_not_do(kwargs: dict[str, object], reason: str) -> None:
    with pytest.raises(UnsupportedModelError, match=reason):
        _call(**kwargs)  # type: ignore[arg-type]


def test_attention_needs_a_layer_index() -> None:
    module = _Module()
    module.layer_idx = 1
    with pytest.raises(UnsupportedModelError, match="layer index"):
        _call(module)
    with pytest.raises(UnsupportedModelError, match="layer index"):
        _call(torch.nn.Module())


class _Decoding(ReferenceAttention):
    """Decode steps by the reference too, or whatever `spoil` makes of its result."""

    def __init__(self, spoil: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._spoil = spoil

    def attend_decode(
        self, step: DecodeStep, arena: KVArena, layer: int, query: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        ends, tables = step.used.tolist(), step.tables.tolist()
        inputs = [SequenceInput([0], end - 1, table) for end, table in zip(ends, tables, strict=True)]
        batch = build_batch(inputs, arena.layout.page_size, query.device)
        return self._spoil(super().attend(batch, arena, layer, query, params))


class _KernelError(Exception):
    """As Triton's: no `RuntimeError`, and maybe without a text."""


def _raise(_: torch.Tensor) -> torch.Tensor:
    raise _KernelError


class _WithoutSinks:
    name = "without"

    def attend(self, batch, arena, layer, query, params):  # type: ignore[no-untyped-def]
        return ReferenceAttention().attend(batch, arena, layer, query, replace(params, sinks=None))


def test_a_kernel_that_passes_sinks_over_does_not_serve_a_model_that_has_some() -> None:
    layout, cpu = KVLayout(1, 2, 16, 4, "float32"), torch.device("cpu")
    assert refusal(_WithoutSinks(), layout, cpu) is None
    assert "differs from the reference" in str(refusal(_WithoutSinks(), layout, cpu, sinks=True))
    assert refusal(ReferenceAttention(), layout, cpu, sinks=True) is None
    assert has_sinks(AutoConfig.for_model("gpt_oss"))
    assert not has_sinks(AutoConfig.for_model("qwen3_moe"))


@pytest.mark.parametrize("page_size", [1, 4, 16, 256])
def test_a_kernel_is_tried_before_it_serves(page_size: int) -> None:
    layout, cpu = KVLayout(3, 2, 16, page_size, "float32"), torch.device("cpu")
    assert refusal(ReferenceAttention(), layout, cpu) is None
    assert refusal(_Decoding(lambda output: output), layout, cpu) is None
    wrong = refusal(_Decoding(lambda output: output.flip(0)), layout, cpu)
    assert wrong is not None
    assert wrong.startswith("a decode step differs")
    assert refusal(_Decoding(_raise), layout, cpu) == "_KernelError: "
