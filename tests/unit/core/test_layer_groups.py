"""Which pages a text has where layers differ in what they see."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.core.layer_groups import LayerGroups
from tandem.core.pages import PagePool, page_keys, pages_for, windowed_key

PAGE = 4
KINDS = {"alike": (0, 0), "all with a window": (9, 0), "mixed": (9, 1), "mixed in threes": (10, 3)}


@pytest.fixture(params=KINDS.values(), ids=KINDS)
def groups(request: pytest.FixtureRequest) -> LayerGroups:
    return LayerGroups(PAGE, *request.param)


def test_pages_that_are_seen_are_all_of_some_layers_and_the_last_ones_of_the_others() -> None:
    assert LayerGroups(PAGE).num_seen(41) == 11
    assert LayerGroups(PAGE, 9).num_seen(41) == 11 - 8
    assert LayerGroups(PAGE, 9, 3).num_seen(41) == 11 + 3 * (11 - 8)
    assert LayerGroups(PAGE, 9, 3).num_seen(7) == 2 + 3 * 2


def test_the_longest_text_that_has_room_takes_no_more_pages() -> None:
    for groups in (LayerGroups(PAGE), LayerGroups(PAGE, 9, 1), LayerGroups(PAGE, 10, 3)):
        for num_pages in range(1, 99):
            most = groups.most_tokens(num_pages, 8)
            assert groups.most_pages(most, 8) <= num_pages < groups.most_pages(most + 1, 8)


def test_a_table_and_a_list_are_two_forms_of_the_same(groups: LayerGroups) -> None:
    for num_tokens in range(1, 60):
        num_hidden, num_places = groups.num_hidden(num_tokens), pages_for(num_tokens, PAGE)
        pages = list(range(100, 100 + groups.num_seen(num_tokens)))
        table, windowed = groups.tables(pages, num_hidden, num_places)
        assert len(table) == num_places
        assert len(windowed) == num_places * groups.num_windowed
        assert list(groups.listed(table, windowed, num_hidden)) == pages
        halves = [groups.listed(table, windowed, num_hidden, *part) for part in ((0, 3), (3, num_places))]
        assert [page for half in halves for page in half] == pages
        assert groups.places_of(len(pages), num_hidden) == num_places
        # What is given back stands as page 0.
        hidden = windowed[: num_hidden * groups.num_windowed] if groups.num_windowed else table[:num_hidden]
        assert set(hidden) <= {0}
        keys = page_keys(range(num_places * PAGE), PAGE, b"m")
        named = groups.listed_keys(keys, num_hidden)
        assert len(set(named)) == len(named) == len(pages)
        assert named == groups.listed_keys(keys[:3], num_hidden) + groups.listed_keys(keys[3:], num_hidden, 3)


def test_at_the_end_layers_with_a_window_may_lack_pages() -> None:
    """Those of a prompt's last places come when the first ones are given back."""
    groups = LayerGroups(PAGE, 9, 2)
    table, windowed = groups.tables([1, 2, 20, 21, 3, 30, 31, 4, 5], 1, 5)
    assert table.tolist() == [1, 2, 3, 4, 5]
    assert windowed.tolist() == [0, 0, 20, 21, 30, 31]
    assert groups.listed(table, windowed, 1) == [1, 2, 20, 21, 3, 30, 31, 4, 5]


def test_a_handoff_counts_the_pages_that_are_seen_place_by_place() -> None:
    groups = LayerGroups(PAGE, 9, 2)
    assert groups.num_hidden(41) == 8
    assert [groups.index_of(place, 8) for place in (0, 7, 8, 9, 11)] == [0, 7, 8, 11, 17]
    assert groups.num_handed_off(41) == groups.num_seen(41) == 17
    assert [groups.whole_places(num, 8) for num in (0, 8, 9, 10, 11, 17)] == [0, 8, 8, 8, 9, 11]
    # Where no layer sees all, those that nobody sees count, too: a grant passes over them.
    assert LayerGroups(PAGE, 9).num_handed_off(41) == 11


@pytest.mark.long
@given(held=st.lists(st.tuples(*[st.booleans()] * 3), max_size=16), window=st.integers(1, 5 * PAGE))
def test_the_longest_beginning_is_found_that_is_held_as_far_as_it_is_seen(
    held: list[tuple[bool, ...]], window: int
) -> None:
    groups, pool = LayerGroups(PAGE, window, 2), PagePool(50, PAGE)
    keys = page_keys(range(len(held) * PAGE), PAGE, b"m")
    for key, of_place in zip(keys, held, strict=True):
        for name, is_held in zip((key, windowed_key(key, 0), windowed_key(key, 1)), of_place, strict=True):
            if is_held:
                (page,) = pool.allocate(1) or []
                pool.publish(page, name)
    ends = [
        end
        for end in range(len(held) + 1)
        if all(place[0] for place in held[:end])
        and all(place[1] and place[2] for place in held[groups.num_hidden(end * PAGE) : end])
    ]
    num_hidden, pages = groups.acquire(pool, keys)
    assert groups.places_of(len(pages), num_hidden) == ends[-1]
    assert pages == pool.acquire(groups.listed_keys(keys[: ends[-1]], num_hidden))
    assert len(pages) == groups.num_seen(ends[-1] * PAGE)


def test_routers_hear_of_pages_of_layers_that_see_all_only() -> None:
    pool = PagePool(4, PAGE)
    key = page_keys(range(PAGE), PAGE, b"m")[0]
    one, two, three = pool.allocate(3) or []
    pool.publish(one, windowed_key(key, 0))
    pool.note_changes()
    pool.publish(two, key)
    pool.publish(three, windowed_key(key, 1))
    change = pool.take_changes()
    assert change is not None
    assert change.came == (key,)
