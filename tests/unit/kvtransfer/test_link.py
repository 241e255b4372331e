"""How much is under way on a link, what it teaches of the link, whose turn it is, and which write is overdue."""

from __future__ import annotations

import pytest

from kvtransfer.protocol.link import Link
from kvtransfer.protocol.link_window import LinkLimits, LinkWindow
from kvtransfer.protocol.messages import AttemptKey

MB, MIB = 1_000_000, 1 << 20
LIMITS = LinkLimits()
A, B, C = (AttemptKey(name, 1) for name in "abc")


def send(window: LinkWindow, bytes_per_s: float, round_trip_s: float, num_bytes: int, now_s: float = 0.0) -> float:
    """Keep the window full until so much is sent, on a link like that; return when the last byte has arrived."""
    free_s, under_way = now_s, list[tuple[float, int, float, bool]]()
    while num_bytes > 0 or under_way:
        while num_bytes > 0 and window.ask_room():
            size, is_alone = min(window.write_bytes, num_bytes), not under_way
            window.acquire(size, now_s)
            free_s = max(free_s, now_s) + size / bytes_per_s
            under_way.append((free_s + round_trip_s, size, now_s, is_alone))
            num_bytes -= size
        now_s, size, posted_s, is_alone = under_way.pop(0)
        window.complete(size, now_s, alone_s=now_s - posted_s if is_alone else None)
    return now_s


@pytest.mark.parametrize("bytes_per_s", [2 * MB, 20 * MB, 100 * MB, 1_000 * MB, 12_000 * MB])
@pytest.mark.parametrize("round_trip_s", [0.0001, 0.002, 0.05, 0.2])
def test_it_learns_what_the_link_carries_and_keeps_it_full(bytes_per_s: float, round_trip_s: float) -> None:
    window, num_bytes = LinkWindow(LIMITS), int(20 * bytes_per_s)
    took_s = send(window, bytes_per_s, round_trip_s, num_bytes)
    assert took_s < 1.25 * num_bytes / bytes_per_s + 4 * round_trip_s
    assert window.bytes_per_s == pytest.approx(bytes_per_s, rel=0.3)
    assert window.size_bytes <= max(LIMITS.least_bytes, 1.3 * bytes_per_s * LIMITS.drain_s)
    assert window.num_bytes == 0


def test_what_it_holds_drains_within_the_time_that_is_given() -> None:
    window = LinkWindow(LinkLimits(drain_s=0.025))
    send(window, 100 * MB, 0.2, 400 * MB)
    assert window.size_bytes <= 1.3 * 100 * MB * 0.025, "however long the round trip"


def test_completions_that_come_late_and_all_at_once_teach_the_same() -> None:
    window, now_s = LinkWindow(LIMITS), 0.0
    for _ in range(50):
        sizes = list[int]()
        while window.ask_room():
            sizes.append(window.write_bytes)
            window.acquire(sizes[-1], now_s)
        now_s += sum(sizes) / (100 * MB) + 0.03  # nobody has looked for a while
        for size in sizes:
            window.complete(size, now_s)
    assert window.bytes_per_s is not None
    assert 30 * MB < window.bytes_per_s < 110 * MB


def test_an_idle_link_is_not_taken_for_a_slow_one() -> None:
    window = LinkWindow(LIMITS)
    now_s = send(window, 1000 * MB, 0.001, 1000 * MB)
    learnt = window.bytes_per_s
    for _ in range(100):  # a prompt that is computed slowly: a little at a time
        now_s += 1.0
        window.acquire(2 * MIB, now_s)
        now_s += 0.05
        window.complete(2 * MIB, now_s, alone_s=0.05)
    assert window.bytes_per_s == learnt


def test_small_writes_say_nothing_of_the_link() -> None:
    window = LinkWindow(LIMITS)
    window.acquire(1000, 0.0)
    window.complete(1000, 0.01, alone_s=0.01)
    assert window.bytes_per_s is None
    assert window.size_bytes == LIMITS.first_bytes


def test_one_write_may_always_be_under_way() -> None:
    window = LinkWindow(LinkLimits(first_bytes=10, least_bytes=10, batch_bytes=10))
    assert window.ask_room()
    window.acquire(1000, 0.0)
    assert not window.ask_room()
    window.forget(1000)
    assert window.ask_room()


# ---- turns


def turns(link: Link, num: int) -> list[AttemptKey]:
    """Who gets the next turns, where everybody has more to post."""
    got = []
    for number in range(num):
        turn = link.next_turn()
        assert turn is not None
        got.append(turn[0])
        link.post(turn[0], 100 + number, 1, 0.0)
        link.want(turn[0])
    return got


def test_who_waits_takes_turns_and_keeps_his_place() -> None:
    link = Link(LIMITS)
    for key in (A, B, A, C):
        link.want(key)
    assert turns(link, 7) == [A, B, C, A, B, C, A]
    link.leave(B)
    assert turns(link, 3) == [C, A, C]


def test_nobody_has_a_turn_while_the_window_is_full() -> None:
    link = Link(LIMITS)
    link.want(A)
    link.post(B, 0, LIMITS.first_bytes, 0.0)
    assert link.next_turn() is None
    link.complete(B, 0, 1.0)
    assert link.next_turn() is not None
    assert link.next_turn() is None, "nobody waits"


# ---- time

ALLOWED_S = LIMITS.write_timeout_s + 1.0  # for a MB


def test_a_write_has_its_time_from_when_those_before_it_have_arrived() -> None:
    link = Link(LIMITS)
    for write_id in range(4):
        link.post(A, write_id, MB, 0.0)
    assert link.next_deadline_s() == ALLOWED_S
    for write_id in range(3):
        link.complete(A, write_id, 9.0 * (write_id + 1))
        assert link.find_overdue(9.0 * (write_id + 1)) is None
    due_s = link.next_deadline_s()
    assert due_s is not None
    assert due_s > 27.0 + LIMITS.write_timeout_s
    assert link.find_overdue(due_s - 0.001) is None
    overdue = link.find_overdue(due_s)
    assert overdue is not None
    assert overdue.keys == (A,)
    assert link.next_deadline_s() is None
    assert link.window.num_bytes == 0


def test_a_write_that_alone_does_not_arrive_fails_its_handoff_only() -> None:
    link = Link(LIMITS)
    link.post(A, 0, MB, 0.0)
    link.post(B, 0, MB, 0.0)
    link.want(C)
    link.complete(B, 0, 1.0)
    overdue = link.find_overdue(ALLOWED_S)
    assert overdue is not None
    assert overdue.keys == (A,)


def test_where_nothing_arrives_all_fail_who_use_the_link_or_wait_for_it() -> None:
    link = Link(LIMITS)
    link.post(A, 0, MB, 0.0)
    link.post(B, 0, 2 * MB, 0.5)
    link.want(C)
    overdue = link.find_overdue(ALLOWED_S)
    assert overdue is not None
    assert set(overdue.keys) == {A, B, C}


def test_what_is_overdue_has_no_share_in_the_window_and_its_late_end_changes_nothing() -> None:
    link = Link(LIMITS)
    link.post(A, 0, MB, 0.0)
    assert link.find_overdue(ALLOWED_S) is not None
    assert link.window.num_bytes == 0
    link.complete(A, 0, 100.0)
    link.fail(A, 0)
    assert link.window.num_bytes == 0
    assert link.window.bytes_per_s is None


def test_a_write_that_fails_leaves_its_turn_to_the_next() -> None:
    link = Link(LIMITS)
    for write_id in range(3):
        link.post(A, write_id, MB, 0.0)
    link.complete(A, 0, 5.0)
    link.fail(A, 1)
    due_s = link.next_deadline_s()
    assert due_s is not None
    assert 5.0 + LIMITS.write_timeout_s < due_s <= 5.0 + ALLOWED_S


def test_a_connection_that_was_closed_has_nothing_under_way() -> None:
    link = Link(LIMITS)
    link.post(A, 0, LIMITS.first_bytes, 0.0)
    link.want(B)
    assert link.next_turn() is None
    link.close()
    assert link.next_deadline_s() is None
    assert link.next_turn() is not None
    link.complete(A, 0, 1.0)
    assert link.window.num_bytes == 0
