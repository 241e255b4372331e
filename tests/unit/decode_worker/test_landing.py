"""When what a writer says of its writes counts, after its connection was closed."""

from __future__ import annotations

import pytest

from decode_worker.landing import IN_FLIGHT_S, IdleWord, Landing

GRACE_S = 2.0
ONE, TWO, OTHER = IdleWord("d/1", "p", b"1"), IdleWord("d/2", "p", b"2"), IdleWord("d/3", "q", b"3")


@pytest.mark.parametrize(("is_here", "wait_s"), [(True, IN_FLIGHT_S), (False, GRACE_S)])
def test_a_word_waits_until_the_bytes_of_the_connection_had_time_to_land(is_here: bool, wait_s: float) -> None:
    landing = Landing(GRACE_S)
    assert not landing.hold(ONE), "no connection was closed"
    landing.close_link("p", 10.0, is_here=is_here)
    assert landing.hold(ONE)
    assert landing.hold(ONE), "it may be said again"
    assert not landing.hold(OTHER), "another writer's"
    assert list(landing.deadlines_s()) == [10.0 + wait_s]
    assert landing.take_landed(10.0 + wait_s - 0.01) == []
    assert landing.take_landed(10.0 + wait_s) == [ONE]
    assert not landing.hold(ONE)
    assert list(landing.deadlines_s()) == []


def test_each_word_waits_for_the_connections_that_were_closed_before_it_was_said() -> None:
    """And not for those that break later: else a link that breaks again and again would hold it back for ever."""
    landing = Landing(GRACE_S)
    landing.close_link("p", 10.0, is_here=False)
    assert landing.hold(ONE)
    landing.close_link("p", 11.0, is_here=False)
    assert landing.hold(TWO)
    landing.close_link("p", 11.5, is_here=False)
    assert landing.take_landed(12.0) == [ONE]
    assert landing.take_landed(12.9) == []
    assert landing.take_landed(13.0) == [TWO]
    assert list(landing.deadlines_s()) == [13.5]
    assert landing.take_landed(13.5) == []
    assert list(landing.deadlines_s()) == []


def test_an_exit_is_a_fence_once_and_at_its_first_time() -> None:
    landing = Landing(GRACE_S)
    landing.exit("p", 10.0, is_here=True)
    landing.exit("p", 11.0, is_here=False)
    assert landing.take_exited(10.0 + IN_FLIGHT_S - 0.01) == []
    assert landing.take_exited(10.0 + IN_FLIGHT_S) == ["p"]
    assert landing.take_exited(100.0) == []
