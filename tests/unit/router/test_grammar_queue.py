"""Whose new grammar is tried next."""

from __future__ import annotations

import pytest

from router.http.grammar_queue import GrammarQueue


def names(client: str, number: int) -> list[bytes]:
    return [f"{client}{n}".encode() for n in range(number)]


def test_a_client_with_many_holds_up_another_for_one_trial_at_most() -> None:
    queue = GrammarQueue(1, 100, 1000)
    assert all(queue.enter("many", trial) for trial in names("many", 100))
    assert queue.begin() == ("many", b"many0")
    assert queue.enter("other", b"x")
    assert queue.begin() is None
    queue.end("many")
    assert queue.begin() == ("other", b"x")
    queue.end("other")
    assert queue.begin() == ("many", b"many1")


def test_a_client_has_one_under_way_so_that_another_begins_at_once() -> None:
    queue = GrammarQueue(2, 100, 1000)
    assert all(queue.enter("many", trial) for trial in names("many", 3))
    assert queue.begin() == ("many", b"many0")
    assert queue.begin() is None, "the second place is for others"
    assert queue.enter("other", b"x")
    assert queue.begin() == ("other", b"x")


def test_clients_take_turns() -> None:
    queue, begun = GrammarQueue(1, 100, 1000), list[str]()
    for client, number in (("a", 3), ("b", 1), ("c", 2)):
        assert all(queue.enter(client, trial) for trial in names(client, number))
    while (turn := queue.begin()) is not None:
        queue.end(turn[0])
        begun.append(turn[1].decode())
    assert begun == ["a0", "b0", "c0", "a1", "c1", "a2"]


def test_one_client_cannot_take_all_places_that_wait() -> None:
    queue = GrammarQueue(1, 3, 8)
    assert [queue.enter("many", trial) for trial in names("many", 5)] == [True] * 3 + [False] * 2
    queue.begin()
    assert not queue.enter("many", b"one more"), "what is under way counts"
    assert queue.enter("other", b"x")


@pytest.mark.parametrize("num_greedy", [1, 4, 20])
def test_clients_that_ask_for_more_than_all_leave_a_share_to_whoever_comes(num_greedy: int) -> None:
    queue = GrammarQueue(2, 16, 64)
    for number in range(16):
        for greedy in range(num_greedy):
            queue.enter(f"greedy{greedy}", b"%d %d" % (greedy, number))
    num_others = sum(queue.enter("other", trial) for trial in names("other", 16))
    assert num_others >= max(1, 32 // (num_greedy + 1))
    assert queue.enter("third", b"y"), "and there is one more"


def test_there_is_an_end_to_what_waits_and_a_place_again_behind_what_has_ended() -> None:
    queue = GrammarQueue(1, 16, 64)
    assert all(queue.enter(f"c{number}", b"%d" % number) for number in range(64))
    assert not queue.enter("one more", b"x")
    assert queue.enter("one more", b"7"), "it waits already"
    assert queue.begin() is not None
    queue.end("c0")
    assert queue.enter("another", b"x")


def test_who_asks_for_what_waits_in_anothers_line_waits_for_the_earlier_turn_and_it_is_tried_once() -> None:
    queue = GrammarQueue(1, 100, 1000)
    assert all(queue.enter("many", trial) for trial in names("many", 3))
    assert queue.begin() == ("many", b"many0")
    assert queue.enter("other", b"many2")
    assert queue.enter("third", b"many0"), "it is under way"
    queue.end("many")
    assert queue.begin() == ("other", b"many2")
    queue.end("other")
    assert queue.begin() == ("many", b"many1")
    queue.end("many")
    assert queue.begin() is None
    assert queue.enter("many", b"many2"), "asked for anew, it is tried anew"
    assert queue.begin() == ("many", b"many2")


def test_what_was_tried_at_anothers_turn_and_is_asked_for_anew_is_tried_at_its_old_place() -> None:
    """Its first trial may have failed, or been forgotten. Whoever asks would else wait for ever."""
    queue = GrammarQueue(2, 100, 1000)
    assert queue.enter("own", b"long")
    assert queue.begin() == ("own", b"long")
    assert queue.enter("third", b"y")
    assert queue.begin() == ("third", b"y")
    assert all(queue.enter(client, b"x") for client in ("other", "own"))
    queue.end("third")
    assert queue.begin() == ("other", b"x")
    queue.end("other")
    assert queue.begin() is None, "who waits for it has a trial under way"
    assert queue.enter("own", b"x")
    queue.end("own")
    assert queue.begin() == ("own", b"x")
    queue.end("own")
    assert queue.begin() is None


def test_who_leaves_gives_up_its_place_and_nothing_is_tried_for_nobody() -> None:
    queue = GrammarQueue(1, 3, 64)
    assert all(queue.enter("many", trial) for trial in names("many", 3))
    assert queue.begin() == ("many", b"many0")
    queue.leave("many", b"many1", is_wanted=False)
    assert queue.enter("many", b"new")
    queue.leave("many", b"many0", is_wanted=False)
    assert queue.is_running(b"many0"), "until it has ended"
    queue.end("many")
    begun = []
    while (turn := queue.begin()) is not None:
        begun.append(turn[1])
        queue.end("many")
    assert begun == [b"many2", b"new"]


def test_what_another_client_waits_for_is_tried_when_one_leaves() -> None:
    queue = GrammarQueue(1, 3, 64)
    for client in ("a", "b"):
        assert queue.enter(client, b"x")
    queue.leave("a", b"x", is_wanted=True)
    assert queue.begin() == ("b", b"x")
    queue.end("b")
    assert queue.begin() is None
