"""A set that forgets the oldest."""

from __future__ import annotations

from tandem.core.remembered import Remembered


def test_the_newest_are_remembered_and_a_repetition_counts_once() -> None:
    ended = Remembered[str](2)
    for name in ("a", "b", "b"):
        ended.add(name)
    assert ("a" in ended, "b" in ended) == (True, True)
    ended.add("c")
    assert ("a" in ended, "b" in ended, "c" in ended) == (False, True, True)
