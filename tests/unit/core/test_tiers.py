"""What a tier keeps, what goes first, and whether reading is sooner than computing."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tandem.core.tiers import Rate, TierIndex, plan_read

NAMES = [f"{prompt}{depth}" for prompt in "abc" for depth in range(4)]


def parent_of(name: str) -> str | None:
    return f"{name[0]}{int(name[1]) - 1}" if name[1] != "0" else None


class IndexAgainstModel(RuleBasedStateMachine):
    """Any order of calls: it holds what was entered and has not gone, and never too much."""

    @initialize(most_bytes=st.integers(1, 40), most_items=st.integers(1, 10))
    def start(self, most_bytes: int, most_items: int) -> None:
        self.index = TierIndex[str](most_bytes, most_items)
        self.held: dict[str, int] = {}

    def _gone(self, names: list[str]) -> None:
        for name in names:
            del self.held[name]

    @rule(name=st.sampled_from(NAMES), size=st.integers(1, 20))
    def add(self, name: str, size: int) -> None:
        self.held[name] = size
        self._gone(self.index.add(name, size, parent_of(name)))

    @rule(found=st.lists(st.tuples(st.sampled_from(NAMES), st.integers(1, 20)), max_size=6))
    def add_all(self, found: list[tuple[str, int]]) -> None:
        for name, size in found:
            self.held.setdefault(name, size)
        self._gone(self.index.add_all([found]))

    @rule(prompt=st.sampled_from("abc"), length=st.integers(0, 4))
    def use(self, prompt: str, length: int) -> None:
        self.index.use(f"{prompt}{depth}" for depth in range(length))

    @rule(name=st.sampled_from(NAMES))
    def drop(self, name: str) -> None:
        assert self.index.drop(name) == (self.held.pop(name, None) is not None)

    @invariant()
    def holds_what_the_model_holds(self) -> None:
        if hasattr(self, "index"):
            self.index.check()
            assert {name for name in NAMES if name in self.index} == set(self.held)
            assert (len(self.index), self.index.num_bytes) == (len(self.held), sum(self.held.values()))


TestIndex = IndexAgainstModel.TestCase


def test_giving_up_a_large_group_takes_time_in_proportion() -> None:
    """All files of a copied directory may have one time of use."""
    num = 60_000
    index = TierIndex[int](num)
    index.add_all([[(key, 1) for key in range(num)]])
    began_s = time.process_time()
    for key in range(num, 2 * num):  # each evicts one
        index.add(key, 1)
    one_by_one_s = time.process_time() - began_s
    assert len(index) == num
    assert 0 not in index
    assert one_by_one_s < 2.0  # 0.3; 5 where each looks through what has gone already


@given(st.lists(st.sampled_from("abc"), max_size=60), st.integers(1, 12))
def test_what_is_left_of_a_prompt_is_its_beginning(turns: list[str], room: int) -> None:
    """Pages are written as prompts grow, side by side; each turn uses what its prompt has so far."""
    index = TierIndex[str](room)
    lengths = dict.fromkeys("abc", 0)
    for prompt in turns:
        names = [f"{prompt}{depth}" for depth in range(lengths[prompt])]
        index.use(names)
        depth = next((d for d, name in enumerate(names) if name not in index), len(names))
        index.add(f"{prompt}{depth}", 1, f"{prompt}{depth - 1}" if depth else None)
        lengths[prompt] = max(lengths[prompt], depth + 1)
        for other, length in lengths.items():
            held = [f"{other}{d}" in index for d in range(length)]
            assert held == sorted(held, reverse=True), (other, held)


def test_the_prompt_that_was_used_last_stays() -> None:
    index = TierIndex[str](6)
    for name in NAMES[:6]:  # a0 to a3, b0 and b1
        index.add(name, 1, parent_of(name))
    index.use(["a0", "a1", "a2", "a3"])
    assert index.add("c0", 1) == ["b1"]
    assert index.add("c1", 1, "c0") == ["b0"]
    assert index.add("c2", 1, "c1") == ["a3"]


def test_what_is_found_is_older_than_what_is_held() -> None:
    index = TierIndex[str](3)
    index.add("new", 1)
    assert index.add_all([[("oldest", 1)], [("a0", 1), ("a1", 1)]]) == ["oldest"]
    assert index.add("newer", 1) == ["a1"]
    assert "new" in index


def test_what_is_too_large_is_not_kept() -> None:
    index = TierIndex[str](3)
    index.add("a0", 2)
    assert set(index.add("b0", 4)) >= {"b0"}
    assert "b0" not in index


@pytest.mark.parametrize(
    ("page_s", "tokens_per_s", "ahead_s", "num_pages"),
    [
        ([1.0] * 4, 0.0, 0.0, 4),  # nothing has been computed yet
        ([1.0] * 4, 5.0, 0.0, 4),  # 1 s a page against 2 s
        ([1.0] * 4, 20.0, 0.0, 0),
        ([1.0] * 4, 5.0, 5.0, 0),  # others are read before
        ([0.1, 0.1, 9.0, 9.0], 5.0, 0.0, 2),  # those behind the second are in a slow tier
        ([9.0, 9.0, 0.1, 0.1], 5.0, 0.0, 0),  # nor are they worth what is before them
        ([3.0, 0.1, 0.1, 9.0], 5.0, 0.0, 3),
        ([0.1, 0.1, 2.5, 2.5], 5.0, 0.0, 2),  # all are sooner than computing all, and the first two sooner than that
        ([], 5.0, 0.0, 0),
        ([], 0.0, 0.0, 0),
    ],
)
def test_pages_are_read_as_far_as_that_saves_most(
    page_s: list[float], tokens_per_s: float, ahead_s: float, num_pages: int
) -> None:
    """Of pages of 10 tokens."""
    plan = plan_read(page_s, 10, ahead_s=ahead_s, tokens_per_s=tokens_per_s)
    assert (plan.num_pages if plan is not None else 0) == num_pages
    if plan is not None:
        assert plan.read_s == pytest.approx(sum(page_s[:num_pages]))
        assert plan.patience_s == pytest.approx(max(2.0, 4 * (ahead_s + plan.read_s)))


def test_a_rate_is_forgotten() -> None:
    rate = Rate(guess=7.0, holds_s=60.0)
    assert rate.at(0.0) == 7.0
    rate.learn(100.0, 2.0, now_s=0.0)
    assert rate.at(59.0) == 50.0
    rate.learn(100.0, 1.0, now_s=59.0)
    assert 50.0 < rate.at(60.0) < 100.0
    rate.learn(0.0, 1.0, now_s=100.0)  # says nothing
    assert rate.at(119.5) == 7.0
