"""Block tables of a batch: what each sequence's row holds, and that a page outside of the arena reaches no kernel."""

from __future__ import annotations

import numpy as np
import pytest

from tandem.core.pages import page_table
from tandem.engine.batch import SequenceInput, check_pages, fill_tables


def test_a_row_holds_the_pages_that_its_sequence_uses() -> None:
    tables = np.full((4, 5), 9, np.int32)
    sequences = [
        SequenceInput([1], 8, page_table([3, 1, 2])),  # nine tokens: the third page
        SequenceInput([1, 1], 1, [7, 8]),  # three: the second is of no use yet
        SequenceInput([1] * 4, 0, range(4, 5)),
    ]
    filled = fill_tables(tables, sequences, 4)
    assert filled.tolist() == [[3, 1, 2], [7, 9, 9], [4, 9, 9]]
    assert np.shares_memory(filled, tables)


def test_a_table_goes_on_to_grow_after_it_was_laid_out() -> None:
    pages = page_table([3])
    tables = fill_tables(np.zeros((1, 2), np.int32), [SequenceInput([1], 3, pages)], 4)
    pages.append(5)
    assert tables.tolist() == [[3]]
    assert fill_tables(np.zeros((1, 2), np.int32), [SequenceInput([1], 4, pages)], 4).tolist() == [[3, 5]]


@pytest.mark.parametrize("page", [-1, 10, 2**31 - 1, -(2**31)])
def test_a_page_outside_of_the_arena_is_named_and_the_table_cleared(page: int) -> None:
    """The next step uses the same memory, and shall not find the page there."""
    tables = np.array([[1, 2], [page, 0]], np.int32)
    with pytest.raises(ValueError, match=f"page {page} is outside of the arena of 10 pages"):
        check_pages(tables, 10)
    assert not tables.any()


def test_pages_of_the_arena_pass() -> None:
    tables = np.array([[0, 9]], np.int32)
    check_pages(tables, 10)
    check_pages(tables[:0], 10)
    assert tables.tolist() == [[0, 9]]
