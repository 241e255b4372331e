"""Decode steps by programs that are made once have the bits of the eager batch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engine_helpers import NUM_PAGES, PAGE_SIZE, load_engine, make_prompt, prefilled

from tandem.core.pages import page_table
from tandem.engine.batch import SequenceInput
from tandem.engine.cpu import decode_programs, decoder
from tandem.engine.cpu.decode_programs import DecodePrograms
from tandem.engine.cpu.layer_kernels import ROWS_FOR_THREADS
from tandem.engine.engine import Engine

MAX_CONTEXT = 6 * PAGE_SIZE + 1
#: The token that a step computes: the first of all, and the last of a page, the first of the next, the last of all.
STARTS = (0, PAGE_SIZE - 1, PAGE_SIZE, 2 * PAGE_SIZE - 1, 3 * PAGE_SIZE + 5, MAX_CONTEXT - 1)


@pytest.fixture(scope="module", params=[1, 2])
def loaded(llama_dir: Path, request: pytest.FixtureRequest) -> Engine:
    return load_engine(llama_dir, max_context=MAX_CONTEXT, num_threads=request.param)


@pytest.fixture
def engine(loaded: Engine) -> Engine:
    """With an arena in which only what was written is a number."""
    loaded.arena.tensor.fill_(float("nan"))
    return loaded


def programs(engine: Engine) -> DecodePrograms:
    assert isinstance(engine._decode, DecodePrograms)
    return engine._decode


def eager(engine: Engine, steps: list[SequenceInput]) -> torch.Tensor:
    return engine._paged.forward(steps)


@pytest.mark.parametrize("num_seqs", range(1, len(STARTS) + 1))
def test_a_step_has_the_bits_of_the_eager_one(engine: Engine, num_seqs: int) -> None:
    steps = prefilled(engine, range(NUM_PAGES), STARTS[-num_seqs:])
    before = engine.arena.tensor.clone()
    expected = eager(engine, steps)
    expected_kv = engine.arena.tensor.clone()
    engine.arena.tensor.copy_(before)

    logits = programs(engine).forward(steps)
    assert torch.equal(logits, expected)
    assert torch.equal(engine.arena.tensor.nan_to_num(nan=1e9), expected_kv.nan_to_num(nan=1e9))


def test_steps_of_any_size_follow_one_another(engine: Engine) -> None:
    """Memory is used again: no row of a larger step, or of another sequence, shows in a later one."""
    steps = prefilled(engine, range(NUM_PAGES), STARTS)
    for chosen in ([0, 1, 2, 3, 4, 5], [5], [2, 4, 0], [3, 1], [4, 5, 0, 1, 2], [0], [1, 3, 2]):
        batch = [steps[index] for index in chosen]
        expected = eager(engine, batch)
        assert torch.equal(programs(engine).forward(batch), expected), chosen


def test_a_sequence_grows_over_the_borders_of_pages(engine: Engine) -> None:
    tokens, pages = make_prompt(3 * PAGE_SIZE, seed=5), [7, 2, 31, 4]  # one more than is needed
    engine.forward([SequenceInput(tokens[:3], 0, pages)])
    rows = [engine.forward([SequenceInput([tokens[at]], at, pages)])[0].clone() for at in range(3, len(tokens))]
    whole = engine.forward([SequenceInput(tokens, 0, [20, 21, 22], len(tokens))])
    assert torch.equal(torch.stack(rows), whole[3:])


def test_a_program_is_made_once_for_each_size(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    monkeypatch.setattr(decode_programs, "_FixedInputs", _recording(made))
    fresh = DecodePrograms(engine._paged, engine._decoder, engine._backend)  # type: ignore[arg-type]
    steps = prefilled(engine, range(NUM_PAGES), STARTS)
    for number in (1, 3, 3, 1, 6, 3):
        fresh.forward(steps[:number])
    assert made == [1, 3, 6]


def _recording(made: list[int]) -> type[decode_programs._FixedInputs]:
    class Recording(decode_programs._FixedInputs):
        def batch(self, num_rows: int) -> decode_programs.PagedBatch:
            made.append(num_rows)
            return super().batch(num_rows)

    return Recording


@pytest.mark.parametrize("grows", ["workspace", "rotary tables"])
def test_memory_that_has_moved_is_not_used(llama_dir: Path, monkeypatch: pytest.MonkeyPatch, grows: str) -> None:
    monkeypatch.setattr(decoder, "_LEAST_POSITIONS", 8 if grows == "rotary tables" else 512)
    engine = load_engine(llama_dir)
    first, others = SequenceInput([3], 0, [0]), range(1, 20)
    expected = engine.forward([first]).clone()
    places = engine._decoder._places()  # type: ignore[union-attr]
    if grows == "workspace":
        engine.forward([SequenceInput(make_prompt(300, 1), 0, others)])
    else:
        engine.forward([SequenceInput([4], 300, others)])
    assert engine._decoder._places() != places  # type: ignore[union-attr]
    logits = engine.forward([first])
    assert torch.equal(logits, expected)
    assert logits.data_ptr() == engine._decoder._logits.data_ptr(), "all programs share it"  # type: ignore[union-attr]


def test_block_tables_that_have_moved_are_not_read(llama_dir: Path) -> None:
    engine = load_engine(llama_dir)
    expected = engine.forward([SequenceInput([3], 0, page_table([0]))]).clone()
    tables = engine._paged.tables.tensor
    engine.forward([SequenceInput([3, 4], 0, page_table([page])) for page in range(1, 9)])
    assert engine._paged.tables.tensor is not tables, "more sequences have more rows"
    assert torch.equal(engine.forward([SequenceInput([3], 0, page_table([9]))]), expected)


def test_threads_that_come_and_go_change_no_bit(llama_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The attention of a few sequences is cut by their number."""
    engine = load_engine(llama_dir)
    step = [SequenceInput([3], 0, [0]), SequenceInput([4], 0, [1])]
    found = []
    for number in (1, 4, 2, 4):
        monkeypatch.setattr(decode_programs, "threads_now", lambda _, number=number: number)
        found.append(engine.forward(step).clone())
    assert all(torch.equal(logits, found[0]) for logits in found)


def test_what_goes_by_programs(engine: Engine) -> None:
    one = SequenceInput([5], 3, [0])
    takes = programs(engine).takes
    assert takes([one] * (ROWS_FOR_THREADS - 1))
    assert not takes([])
    assert not takes([one] * ROWS_FOR_THREADS)
    assert not takes([one, SequenceInput([5, 6], 3, [0])])
    assert not takes([one, SequenceInput([5], 3, [0], num_logits=0)])


def test_who_asks_hears_of_each_layer(engine: Engine) -> None:
    seen: list[int] = []
    engine.forward([SequenceInput([5], 0, [0])], seen.append)
    assert seen == list(range(engine.layout.num_layers))


@pytest.mark.parametrize(
    "wrong",
    [
        SequenceInput([5], MAX_CONTEXT, list(range(8))),
        SequenceInput([5], PAGE_SIZE, [1]),
        SequenceInput([5], 0, [NUM_PAGES]),
        SequenceInput([100_000], 0, [1]),
    ],
)
def test_what_lies_outside_is_refused_before_anything_is_written(engine: Engine, wrong: SequenceInput) -> None:
    with pytest.raises(ValueError):
        engine.forward([SequenceInput([5], 0, [0]), wrong])
    assert engine.arena.tensor.isnan().all()
