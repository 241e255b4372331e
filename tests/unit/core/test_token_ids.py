"""Token ids and keys in memory: lists to whoever reads them, and nothing for the garbage collector to walk."""

from __future__ import annotations

import gc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.core.page_keys import PageKeys
from tandem.core.pages import page_keys
from tandem.core.token_ids import TokenIds, token_ids

IDS = st.lists(st.integers(0, 2**32 - 1), max_size=40)
KEYS = st.lists(st.binary(min_size=32, max_size=32), max_size=9)
PLACES = st.one_of(st.none(), st.integers(-12, 12))


def test_the_next_tokens_have_room_where_the_others_lie() -> None:
    ids = token_ids([7] * 100_000)
    place, _ = ids.buffer_info()
    ids.extend(range(6000))
    assert ids.buffer_info() == (place, 106_000)
    assert gc.get_referents(ids) == [TokenIds]


def test_a_copy_grows_alone() -> None:
    ids = token_ids([1, 2])
    copy = token_ids(ids)
    copy.append(3)
    assert (list(ids), list(copy)) == ([1, 2], [1, 2, 3])
    with pytest.raises(OverflowError):
        token_ids([-1])


@pytest.mark.long
@given(IDS, st.integers(1, 8))
def test_pages_have_the_keys_that_lists_give(ids: list[int], page_size: int) -> None:
    assert page_keys(token_ids(ids), page_size, b"m") == page_keys(ids, page_size, b"m")


@given(KEYS, KEYS, PLACES, PLACES)
def test_keys_read_as_a_list_of_them(one: list[bytes], more: list[bytes], begin: int | None, end: int | None) -> None:
    keys = PageKeys(one)
    copy = PageKeys(keys)
    keys.extend(more)
    both = one + more
    assert list(keys) == both
    assert [keys[place] for place in range(-len(both), len(both))] == both * 2
    assert list(keys[begin:end]) == both[begin:end]
    assert keys[begin:end] == PageKeys(both[begin:end])
    assert (keys == PageKeys(one)) == (not more)
    assert list(copy) == one
    keys.extend(keys)
    assert list(keys) == both * 2
    for place in (2 * len(both), -2 * len(both) - 1):
        with pytest.raises(IndexError):
            keys[place]


def test_keys_may_grow_while_they_are_gone_through() -> None:
    keys = PageKeys([bytes(32)])
    for key in keys:
        keys.extend([key])
    assert len(keys) == 2


def test_what_is_no_key_is_refused() -> None:
    with pytest.raises(ValueError, match="33 bytes"):
        PageKeys([bytes(33)])
    with pytest.raises(ValueError, match="as they lie"):
        PageKeys([bytes(32)] * 2)[::2]
    assert PageKeys() != []


def test_the_collector_passes_over_keys() -> None:
    keys = PageKeys([bytes(32)] * 10)
    few = len(gc.get_referents(keys))
    keys.extend([bytes(32)] * 1000)
    assert len(gc.get_referents(keys)) == few
