"""Where pages are: look-ups by the beginning of a prompt, what is foreseen, and the bound."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.workers import page_index
from router.workers.page_index import PageIndex


def held(index: PageIndex[int, str], keys: list[int]) -> dict[str, int]:
    known = index.prefix(keys)
    return {worker: known.num_pages(worker) for worker in known.longest(100)}


def test_who_holds_most_of_a_beginning_comes_first() -> None:
    index: PageIndex[int, str] = PageIndex()
    index.add("a", [1, 2])
    index.add("b", [1, 2, 3])
    index.add("c", [2, 3])
    known = index.prefix([1, 2, 3, 4], page_size=16)
    assert known.longest(1) == ["b"]
    assert held(index, [1, 2, 3, 4]) == {"b": 3, "a": 2}
    assert known.num_tokens("b") == 48
    assert known.num_tokens("c") == 0
    assert not index.prefix([9, 1])


def test_no_more_keys_are_made_than_are_held_and_one() -> None:
    index: PageIndex[int, str] = PageIndex()
    index.add("a", [0, 1, 2])
    taken: list[int] = []
    index.prefix(taken.append(key) or key for key in range(1000))
    assert taken == [0, 1, 2, 3]


def test_what_was_foreseen_is_forgotten_unless_it_was_told() -> None:
    index: PageIndex[int, str] = PageIndex()
    index.add("a", [1])
    new = index.foresee("a", [1, 2, 3])
    assert new == [2, 3]
    assert held(index, [1, 2, 3]) == {"a": 3}
    index.add("a", [2])
    index.forget("a", new)
    assert held(index, [1, 2, 3]) == {"a": 2}
    index.forget("b", [1])
    assert held(index, [1, 2, 3]) == {"a": 2}


def test_a_worker_that_is_gone_holds_nothing_and_its_bit_is_used_again() -> None:
    index: PageIndex[int, str] = PageIndex()
    for number in range(5000):
        index.add(f"worker {number}", range(3))
        index.drop(f"worker {number - 1}")
    assert held(index, [0, 1, 2]) == {"worker 4999": 3}
    assert max(index.prefix([0]).bits.values()) <= 2
    index.drop("worker 4999")
    assert len(index) == 0


def test_keys_of_which_nobody_asked_make_room_for_new_ones() -> None:
    index: PageIndex[int, str] = PageIndex(most=3)
    index.add("a", [1, 2])
    index.add("b", [1])
    index.add("a", [3, 4])
    assert len(index) == 3, "of 1 and 2 the former was entered once more"
    assert not index.prefix([2])
    assert held(index, [1]) == {"a": 1, "b": 1}
    assert held(index, [3, 4]) == {"a": 2}


def test_a_beginning_that_is_found_all_along_is_not_forgotten() -> None:
    index: PageIndex[int, str] = PageIndex(most=20)
    index.add("a", range(10))
    for number in range(100, 2000, 5):
        assert held(index, list(range(10))) == {"a": 10}
        index.add("b", range(number, number + 5))


def test_a_worker_that_held_much_and_is_gone_is_taken_out_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_index, "_MOST_SWEPT", 10)
    index: PageIndex[int, str] = PageIndex()
    index.add("a", range(25))
    index.add("b", range(5))
    index.drop("a")
    assert len(index) > 5, "not all at once"
    assert held(index, list(range(25))) == {"b": 5}, "and yet nobody finds it"
    index.add("a", [0])  # as a new one
    assert held(index, list(range(25))) == {"b": 5, "a": 1}
    index.add("b", [])
    assert len(index) == 5


def test_of_two_that_leave_the_oldest_keys_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_index, "_MOST_SWEPT", 0)
    index: PageIndex[int, str] = PageIndex(most=4)
    index.add("a", [1, 2])
    index.add("b", [1, 3])
    index.drop("a")
    index.add("b", [4, 5, 6])
    assert len(index) == 4
    assert held(index, [4, 5, 6]) == {"b": 3}
    assert not index.prefix([1])


@given(st.lists(st.integers(1, 40), min_size=1, max_size=12))
def test_however_long_each_holds_it_the_longest_come_first(lengths: list[int]) -> None:
    index: PageIndex[int, int] = PageIndex()
    for worker, length in enumerate(lengths):
        index.add(worker, range(length))
    known = index.prefix(range(50))
    assert [known.num_pages(worker) for worker in range(len(lengths))] == lengths
    assert [known.num_pages(worker) for worker in known.longest(5)] == sorted(lengths, reverse=True)[:5]
    assert known.num_pages(99) == 0


_CHANGES = st.lists(
    st.tuples(
        st.sampled_from(["add", "remove", "drop", "foresee", "forget"]),
        st.sampled_from(["a", "b", "c"]),
        st.lists(st.integers(0, 5), max_size=6),
    ),
    max_size=30,
)


@pytest.mark.long
@pytest.mark.parametrize("swept", [1, 1 << 12], ids=["in pieces", "at once"])
@given(_CHANGES)
def test_whatever_comes_a_look_up_says_what_the_workers_have(
    swept: int, changes: list[tuple[str, str, list[int]]]
) -> None:
    with patch.object(page_index, "_MOST_SWEPT", swept):
        run_and_check(changes)


def run_and_check(changes: list[tuple[str, str, list[int]]]) -> None:
    index: PageIndex[int, str] = PageIndex()
    told: dict[str, set[int]] = {worker: set() for worker in "abc"}
    foreseen: dict[str, set[int]] = {worker: set() for worker in "abc"}
    for what, worker, keys in changes:
        call: Any = getattr(index, what)
        call(worker) if what == "drop" else call(worker, keys)
        match what:
            case "add":
                told[worker].update(keys)
                foreseen[worker].difference_update(keys)
            case "foresee":
                foreseen[worker].update(set(keys) - told[worker])
            case "remove" | "forget":
                foreseen[worker].difference_update(keys)
                if what == "remove":
                    told[worker].difference_update(keys)
            case "drop":
                told[worker].clear()
                foreseen[worker].clear()
    both = {worker: told[worker] | foreseen[worker] for worker in "abc"}
    for start in range(4):
        prompt = [start, start + 1, start + 2]
        expected = {w: next((n for n, key in enumerate(prompt) if key not in keys), 3) for w, keys in both.items()}
        assert held(index, prompt) == {worker: num for worker, num in expected.items() if num}
