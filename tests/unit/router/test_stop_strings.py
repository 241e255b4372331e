"""Stop strings: never shown, not even in part, wherever the text was cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.request.stop_strings import StopMatcher
from tests.support.work import growth


def run(stops: list[str], pieces: list[str]) -> tuple[str, bool]:
    matcher, shown = StopMatcher(stops), ""
    for piece in pieces:
        shown += matcher.push(piece)
        if matcher.is_stopped:
            return shown, True
    return shown + matcher.flush(), False


def test_text_without_stops_passes_at_once() -> None:
    assert StopMatcher([]).push("abc") == "abc"


def test_text_is_held_while_it_may_become_a_stop_string() -> None:
    matcher = StopMatcher(["END"])
    assert matcher.push("xE") == "x"
    assert matcher.push("N") == ""
    assert matcher.push("E") == "EN"
    assert matcher.push("ND more") == ""
    assert matcher.is_stopped


def test_held_text_is_shown_at_the_end() -> None:
    assert run(["END"], ["abEN"]) == ("abEN", False)


@pytest.mark.parametrize(
    ("stops", "text", "shown"),
    [
        (["b"], "abc", "a"),
        (["abcd", "bc"], "abcd", "a"),  # complete first
        (["bc", "abc"], "xabc", "x"),  # complete together: the longest
        (["aab"], "aaab", "a"),
        (["ab", "b"], "ab", ""),
        (["\n\n"], "a\n\nb", "a"),
        (["é→"], "xé→", "x"),
    ],
)
def test_which_stop_string_wins(stops: list[str], text: str, shown: str) -> None:
    assert run(stops, [text]) == (shown, True)
    assert run(stops, list(text)) == (shown, True)


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopMatcher(["a", ""])


def oracle(stops: list[str], text: str) -> tuple[str, bool]:
    """Character by character over the whole text."""
    for end in range(1, len(text) + 1):
        matches = [stop for stop in stops if text[:end].endswith(stop)]
        if matches:
            return text[: end - max(map(len, matches))], True
    return text, False


@given(
    st.lists(st.text("abé", min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(st.text("abé", max_size=4), max_size=8),
)
def test_how_the_text_is_cut_makes_no_difference(stops: list[str], pieces: list[str]) -> None:
    text = "".join(pieces)
    assert run(stops, pieces) == oracle(stops, text)
    matcher, shown = StopMatcher(stops), ""
    for piece in pieces:  # at no time is anything shown that the end takes back
        shown += matcher.push(piece)
        assert oracle(stops, text)[0].startswith(shown)
        if matcher.is_stopped:
            break


def test_what_is_held_is_not_searched_again() -> None:
    stops = [" " * 8192, *(" " * 60 + "x" + " " * num for num in range(45, 60))]

    def hold(num: int) -> None:
        for _ in range(8):
            matcher = StopMatcher(stops)
            for _ in range(num):
                assert matcher.push(" " * 64) == ""

    assert growth(hold, 8) < 9
