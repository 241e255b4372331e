"""What is kept of what was asked for."""

from __future__ import annotations

from tandem.core.recent import Recent, RecentByCost


def kept(most: int, max_size: int = 1000) -> Recent[str, str]:
    return Recent(most, max_size, lambda _, value: len(value))


def test_the_least_recently_asked_for_go_first() -> None:
    recent = kept(2)
    recent.put("a", "1")
    recent.put("b", "2")
    assert recent.get("a") == "1"
    recent.put("c", "3")
    assert [recent.get(key) for key in "abc"] == ["1", None, "3"]


def test_all_together_have_a_size_and_one_alone_may_be_larger() -> None:
    recent = kept(10, max_size=10)
    for key in "abc":
        recent.put(key, "12345")
    assert [recent.get(key) for key in "abc"] == [None, "12345", "12345"]
    recent.put("b", "1")  # what it took before counts no more
    recent.put("d", "1234")
    assert [recent.get(key) for key in "bcd"] == ["1", "12345", "1234"]
    recent.put("e", "x" * 99)
    assert [recent.get(key) for key in "bcde"] == [None, None, None, "x" * 99]
    recent.put("f", "x")
    assert [recent.get(key) for key in "ef"] == [None, "x"]


def test_what_took_long_is_kept_apart_and_nothing_is_kept_twice() -> None:
    recent = RecentByCost(kept(2), kept(2))
    recent.put("slow", "1", is_costly=True)
    for key in "abc":
        recent.put(key, "2", is_costly=False)
    assert [recent.get(key) for key in ("slow", "a", "b", "c")] == ["1", None, "2", "2"]
    recent.put("slow", "3", is_costly=False)
    assert [recent.get(key) for key in ("slow", "b", "c")] == ["3", None, "2"]
    recent.put("slow", "4", is_costly=True)
    assert recent.get("slow") == "4"
