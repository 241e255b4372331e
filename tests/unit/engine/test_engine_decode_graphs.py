"""Decode steps in fixed, padded buffers give what the eager batch gives.

Here a step is repeated without a graph; what a graph adds is tested where a GPU is (`tests/gpu`).
"""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest
import torch
from engine_helpers import PAGE_SIZE, load_engine, make_prompt, prefilled

from tandem.engine.arena import KVArena
from tandem.engine.attention.reference import AttentionParams, ReferenceAttention
from tandem.engine.batch import PagedBatch, SequenceInput
from tandem.engine.cuda.decode_step import DecodeStep
from tandem.engine.cuda.graphs import Compute, DecodeGraphs, buckets_up_to, run_again
from tandem.engine.paged_model import PagedModel

MAX_NUM_SEQS = 6
NUM_PAGES = 40
SCRATCH_PAGE = 13
PAGES = [page for page in range(NUM_PAGES) if page != SCRATCH_PAGE]
MAX_CONTEXT = 5 * PAGE_SIZE + 1
#: The token that a step computes: the first of all, and the last of a page, the first of the next, the last of all.
STARTS = (0, PAGE_SIZE - 1, PAGE_SIZE, 2 * PAGE_SIZE - 1, 3 * PAGE_SIZE + 5, MAX_CONTEXT - 1)
TOLERANCE = 1e-5


class FixedStepAttention(ReferenceAttention):
    """The reference for batches; for steps the same mathematics from their fixed tensors alone, over whole tables."""

    name = "fixed-step"

    def attend_decode(
        self, step: DecodeStep, arena: KVArena, layer: int, query: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        assert step.max_keys == step.tables.shape[1] * PAGE_SIZE
        assert step.offsets.tolist() == list(range(len(step.used) + 1))
        keys, values = (pages[step.tables.long()].flatten(1, 2) for pages in (arena.keys(layer), arena.values(layer)))
        is_seen = torch.arange(step.max_keys)[None, :] < step.used[:, None]
        group = query.shape[1] // keys.shape[2]
        keys, values = (
            torch.where(is_seen[..., None, None], pages, 0.0).repeat_interleave(group, dim=2)
            for pages in (keys, values)
        )
        scores = torch.einsum("bhd,blhd->bhl", query, keys) * params.scaling
        scores = scores.masked_fill(~is_seen[:, None, :], float("-inf"))
        return torch.einsum("bhl,blhd->bhd", scores.softmax(-1), values)


@pytest.fixture(scope="module")
def model(llama_dir: Path) -> PagedModel:
    engine = load_engine(llama_dir)
    arena = KVArena(engine.layout, NUM_PAGES)
    return PagedModel(engine._model, arena, FixedStepAttention(), engine.vocab_size, MAX_CONTEXT)


@pytest.fixture
def paged(model: PagedModel) -> PagedModel:
    """Over an arena in which only what was written is a number."""
    model.arena.tensor.fill_(float("nan"))
    return model


def make_graphs(paged: PagedModel) -> DecodeGraphs:
    return DecodeGraphs(paged, max_num_seqs=MAX_NUM_SEQS, scratch_page=SCRATCH_PAGE, capture=run_again)


def kv_of(paged: PagedModel, steps: list[SequenceInput]) -> torch.Tensor:
    """All pages but the scratch one, as comparable numbers."""
    return paged.arena.tensor[:, PAGES].nan_to_num(nan=1e9)


@pytest.mark.parametrize("num_seqs", range(1, MAX_NUM_SEQS + 1))
def test_a_padded_step_is_the_eager_one(paged: PagedModel, num_seqs: int) -> None:
    graphs = make_graphs(paged)
    steps = prefilled(paged, PAGES, STARTS[-num_seqs:])
    before = paged.arena.tensor.clone()
    expected = paged.forward(steps)
    expected_kv = kv_of(paged, steps)
    paged.arena.tensor.copy_(before)

    logits = graphs.forward(steps)
    assert logits.shape == expected.shape
    assert logits.dtype == torch.float32
    assert (logits - expected).abs().max() < TOLERANCE
    assert (kv_of(paged, steps) - expected_kv).abs().max() < TOLERANCE


def test_steps_of_any_size_follow_one_another(paged: PagedModel) -> None:
    """Buffers are used again: no row of a larger step, or of another sequence, shows in a later one."""
    graphs = make_graphs(paged)
    steps = prefilled(paged, PAGES, STARTS)
    for chosen in ([0, 1, 2, 3, 4, 5], [5], [2, 4, 0], [3, 1], [4, 5, 0, 1, 2], [0]):
        batch = [steps[index] for index in chosen]
        expected = paged.forward(batch)
        assert (graphs.forward(batch) - expected).abs().max() < TOLERANCE, chosen


def test_a_sequence_grows_over_the_borders_of_pages(paged: PagedModel) -> None:
    graphs = make_graphs(paged)
    tokens = make_prompt(3 * PAGE_SIZE, seed=5)
    pages = [7, 2, 31, 4]  # one more than is needed, as after a reservation
    paged.forward([SequenceInput(tokens[:3], 0, pages)])
    rows = [graphs.forward([SequenceInput([tokens[at]], at, pages)])[0] for at in range(3, len(tokens))]
    whole = paged.forward([SequenceInput(tokens, 0, [20, 21, 22], len(tokens))])
    assert (torch.stack(rows) - whole[3:]).abs().max() < TOLERANCE


def test_padding_writes_to_the_scratch_page_alone(paged: PagedModel) -> None:
    make_graphs(paged).forward(prefilled(paged, PAGES, (PAGE_SIZE,)) * 3)  # a bucket of four
    written = ~paged.arena.tensor.isnan().flatten(2).all(2)[0]
    assert written[SCRATCH_PAGE]
    assert written.sum() == 3  # its own two pages
    assert paged.arena.tensor[:, SCRATCH_PAGE, :, 1:].isnan().all()


def test_logits_outlive_the_next_step(paged: PagedModel) -> None:
    """A graph's output lies always in the same memory: here a capture that behaves so."""

    def capture(compute: Compute) -> Compute:
        output = compute().clone()

        def replay() -> torch.Tensor:
            return output.copy_(compute())

        return replay

    graphs = DecodeGraphs(paged, max_num_seqs=2, scratch_page=SCRATCH_PAGE, capture=capture)
    first, second = prefilled(paged, PAGES, (PAGE_SIZE, 7))
    logits = graphs.forward([first])
    kept = logits.clone()
    graphs.forward([second])
    assert torch.equal(logits, kept)


@pytest.mark.long
def test_what_a_graph_reads_stays(paged: PagedModel) -> None:
    """A graph knows addresses: memory that is freed after its capture would soon be somebody else's."""
    reads: list[weakref.ref[Compute]] = []

    def capture(compute: Compute) -> Compute:
        reads.append(weakref.ref(compute))
        output = compute()
        return lambda: output

    graphs = DecodeGraphs(paged, max_num_seqs=2, scratch_page=SCRATCH_PAGE, capture=capture)
    gc.collect()
    assert [kept() is not None for kept in reads] == [True, True]
    assert graphs.buckets == (1, 2)


def test_what_is_captured(paged: PagedModel) -> None:
    """Each size once, the greatest first; and only batches of single tokens with logits are taken."""
    sizes: list[int] = []

    def capture(compute: Compute) -> Compute:
        sizes.append(len(compute()))
        return compute

    graphs = DecodeGraphs(paged, max_num_seqs=MAX_NUM_SEQS, scratch_page=SCRATCH_PAGE, capture=capture)
    assert sizes == [6, 4, 2, 1]
    one = SequenceInput([5], 3, [0])
    assert graphs.takes([one] * MAX_NUM_SEQS)
    assert not graphs.takes([])
    assert not graphs.takes([one] * (MAX_NUM_SEQS + 1))
    assert not graphs.takes([one, SequenceInput([5, 6], 3, [0])])
    assert not graphs.takes([one, SequenceInput([5], 3, [0], num_logits=0)])


@pytest.mark.parametrize(
    ("greatest", "buckets"),
    [(1, (1,)), (2, (1, 2)), (5, (1, 2, 4, 5)), (8, (1, 2, 4, 8)), (65, (1, 2, 4, 8, 16, 32, 64, 65))],
)
def test_buckets(greatest: int, buckets: tuple[int, ...]) -> None:
    assert buckets_up_to(greatest) == buckets


@pytest.mark.parametrize(
    "wrong",
    [
        SequenceInput([5], MAX_CONTEXT, list(range(6))),
        SequenceInput([5], PAGE_SIZE, [1]),
        SequenceInput([5], 0, [NUM_PAGES]),
        SequenceInput([100_000], 0, [1]),
    ],
)
def test_what_lies_outside_is_refused_before_anything_is_written(paged: PagedModel, wrong: SequenceInput) -> None:
    graphs = make_graphs(paged)
    paged.arena.tensor.fill_(float("nan"))
    with pytest.raises(ValueError):
        graphs.forward([SequenceInput([5], 0, [0]), wrong])
    assert paged.arena.tensor.isnan().all()


def test_attention_that_reads_the_batch_on_the_host_is_refused(paged: PagedModel) -> None:
    class HostAttention:
        name = "host"

        def attend(
            self, batch: PagedBatch, arena: KVArena, layer: int, query: torch.Tensor, params: AttentionParams
        ) -> torch.Tensor:
            raise AssertionError("never asked")

    other = PagedModel(paged.model, paged.arena, HostAttention(), paged.vocab_size, MAX_CONTEXT)
    with pytest.raises(TypeError, match="host attention"):
        make_graphs(other)
