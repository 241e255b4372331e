"""Block tables that are kept: what each sequence's row holds, that a step writes only what is new, and that a page
outside of the arena reaches no kernel. `tests/unit/worker/test_kept_tables.py` has all that happens to batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from tandem.core.pages import PageTable, page_table
from tandem.engine import block_tables
from tandem.engine.batch import SequenceInput, build_batch
from tandem.engine.block_tables import BlockTables

CPU = torch.device("cpu")
PAGE_SIZE = 4


def make_tables(num_rows: int = 0, *, width: int = 5, num_windowed: int = 0, is_copied: bool = False) -> BlockTables:
    return BlockTables(width, 10, num_windowed=num_windowed, device=CPU, num_rows=num_rows, is_copied=is_copied)


def one(pages: Sequence[int], windowed: PageTable | None = None) -> SequenceInput:
    return SequenceInput([1], 0, pages, windowed=windowed or page_table())


def test_a_row_holds_the_pages_of_its_sequence() -> None:
    tables = make_tables()
    sequences = [one(page_table([3, 1, 2])), one([7, 8]), one(range(4, 5))]
    rows = tables.rows(sequences)
    assert sorted(rows) == [0, 1, 2]
    for row, sequence in zip(rows, sequences, strict=True):
        assert tables.tensor[0, row, : len(sequence.pages)].tolist() == list(sequence.pages)


@pytest.mark.parametrize("is_copied", [False, True])
@pytest.mark.parametrize("num_pages", [32, 4096])
def test_a_step_writes_what_is_new_however_long_the_contexts_are(num_pages: int, is_copied: bool) -> None:
    tables = BlockTables(num_pages + 8, 1 << 20, device=CPU, is_copied=is_copied)
    pages = [page_table(range(first, first + num_pages)) for first in (0, num_pages)]
    sequences = [one(table) for table in pages]
    tables.rows(sequences)
    assert tables.num_written == 2 * num_pages

    tables.rows(sequences)
    tables.rows(sequences[::-1])
    assert tables.num_written == 2 * num_pages, "nothing is new"
    pages[1].append(9)
    _, row = tables.rows(sequences)
    assert tables.num_written == 2 * num_pages + 1
    assert tables.tensor[0, row, : num_pages + 1].tolist() == pages[1].tolist()


def test_rows_stay_whatever_the_order_and_who_comes_gets_that_of_who_has_rested_longest() -> None:
    tables = make_tables(num_rows=3)
    a, b, c, d = (one(page_table([page])) for page in range(4))
    of_a, of_b, of_c = tables.rows([a, b, c])
    assert tables.rows([c, a]) == [of_c, of_a]
    assert tables.rows([d, c]) == [of_b, of_c], "b has rested longest"
    assert tables.rows([b, d, c]) == [of_a, of_b, of_c]
    assert tables.tensor[0, [of_a, of_b, of_c], 0].tolist() == [1, 3, 2]


def test_more_sequences_than_rows_make_more_rows_and_lose_none() -> None:
    tables = make_tables(num_rows=1)
    sequences = [one(page_table([page, 9 - page])) for page in range(7)]
    for number in (1, 2, 7):
        rows = tables.rows(sequences[:number])
        assert len(set(rows)) == number
        assert tables.tensor[0, rows, :2].tolist() == [s.pages.tolist() for s in sequences[:number]]  # type: ignore[attr-defined]


def test_a_device_without_room_for_more_rows_costs_those_that_came_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tables = make_tables(is_copied=True)
    known, more = [one(page_table([1])), one(page_table([2]))], [one(page_table([page])) for page in range(3, 8)]
    rows = tables.rows(known)

    def no_room(*_: object, **__: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("no room")

    with monkeypatch.context() as patched:
        patched.setattr(torch, "zeros", no_room)
        with pytest.raises(torch.OutOfMemoryError):
            tables.rows(known + more)
    assert tables.rows(known) == rows
    assert [int(tables.tensor[0, row, 0]) for row in tables.rows(known + more)] == [1, 2, 3, 4, 5, 6, 7]


def test_what_could_not_be_copied_to_the_device_is_copied_by_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    tables = make_tables(2, is_copied=True)
    sequence = one(page_table([1, 2]))

    def no_room(*_: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("no room")

    with monkeypatch.context() as patched:
        patched.setattr(block_tables, "to_device", no_room)
        with pytest.raises(torch.OutOfMemoryError):
            tables.rows([sequence])
    (row,) = tables.rows([sequence])
    assert tables.tensor[0, row, :2].tolist() == [1, 2]


def test_one_that_stands_twice_in_a_batch_has_one_row() -> None:
    sequence = one(page_table([6]))
    assert make_tables().rows([sequence, sequence]) == [0, 0]


@pytest.mark.parametrize(
    "edit",
    [
        lambda table: table.__setitem__(1, 7),
        lambda table: table.__setitem__(slice(0, 2), page_table([7, 8])),
        lambda table: (table.pop(), table.append(7)),
        lambda table: (table.__delitem__(slice(1, 3)), table.extend([7, 8])),
    ],
)
@pytest.mark.parametrize("is_copied", [False, True])
def test_replaced_pages_are_written_anew(edit: Callable[[PageTable], object], is_copied: bool) -> None:
    tables, pages = make_tables(is_copied=is_copied), page_table([3, 1, 2])
    tables.rows([one(pages)])
    edit(pages)
    (row,) = tables.rows([one(pages)])
    assert tables.tensor[0, row, :3].tolist() == pages.tolist()


def test_what_is_hidden_is_not_written() -> None:
    tables, pages = make_tables(), page_table([3, 1, 2])
    tables.rows([one(pages)])
    pages.hide(0, 2)
    assert pages.tolist() == [0, 0, 2]
    pages.append(5)
    (row,) = tables.rows([one(pages)])
    assert tables.num_written == 4
    assert tables.tensor[0, row, 2:4].tolist() == [2, 5]


def test_a_list_is_written_each_time() -> None:
    tables, pages = make_tables(), [3, 1]
    tables.rows([one(pages)])
    pages[0] = 4
    (row,) = tables.rows([one(pages)])
    assert tables.tensor[0, row, :2].tolist() == [4, 1]


def test_layers_with_a_window_have_tables_of_their_own() -> None:
    tables, pages, windowed = make_tables(num_windowed=2), page_table([1, 2]), page_table([3, 4, 5, 6])
    (row,) = tables.rows([one(pages, windowed)])
    assert tables.tensor[:, row, :2].tolist() == [[1, 2], [3, 5], [4, 6]]
    windowed.hide(0, 2)
    windowed.extend([7, 8])
    tables.rows([one(pages, windowed)])
    assert tables.tensor[1:, row, 1:3].tolist() == [[5, 7], [6, 8]]
    assert tables.num_written == 8
    tables.rows([one(pages, page_table([9, 8, 7, 6]))])
    assert tables.tensor[1:, row, :2].tolist() == [[9, 7], [8, 6]]


def test_a_table_goes_on_to_grow_after_it_was_laid_out() -> None:
    tables, pages = make_tables(), page_table([3])
    tables.rows([one(pages)])
    pages.append(5)  # no array looks at it
    assert tables.tensor[0, 0, :2].tolist() == [3, 0]


@pytest.mark.parametrize("num_before", [0, 6])
@pytest.mark.parametrize("page", [-1, 10, 2**31 - 1, -(2**31)])
def test_a_page_outside_of_the_arena_is_named_and_nowhere_in_the_tables(page: int, num_before: int) -> None:
    tables, wrong = make_tables(width=9), page_table([1] * num_before + [page])
    for _ in range(2):
        with pytest.raises(ValueError, match=f"page {page} is outside of the arena of 10 pages"):
            tables.rows([one(page_table([2])), one(wrong)])
    assert 0 <= tables.tensor.min() <= tables.tensor.max() < 10
    wrong[num_before] = 9
    (row,) = tables.rows([one(wrong)])
    assert tables.tensor[0, row, : len(wrong)].tolist() == wrong.tolist()


def test_a_batch_names_its_rows() -> None:
    tables = make_tables(num_rows=4)
    a, b = SequenceInput([5], 6, page_table([8, 3])), SequenceInput([6, 7], 0, page_table([4]))
    build_batch([a, b], PAGE_SIZE, CPU, tables)
    batch = build_batch([b, a], PAGE_SIZE, CPU, tables)
    assert [batch.block_tables[rows.index, 0].item() for rows in batch.sequences] == [4, 8]
    assert batch.write_pages.tolist() == [4, 4, 3]
    assert batch.block_tables.data_ptr() == tables.tensor.data_ptr(), "no copy"
