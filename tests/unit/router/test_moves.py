"""Requests leave a draining worker a few at a time, in the order in which they asked."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from router.lifecycle.migration_slots import MigrationSlots
from router.request.events import Event, MayMove
from router.request.mailbox import Mailbox


def turns(*inboxes: Mailbox[Event]) -> list[int]:
    """How often each was told since the last time."""
    return [len(asyncio.run(inbox.take())) if inbox._items else 0 for inbox in inboxes]


def test_the_next_one_goes_when_one_is_done() -> None:
    moves = MigrationSlots(2)
    a, b, c, d = (Mailbox[Event]() for _ in range(4))
    for inbox in (a, b, c, d, c, a):
        moves.ask(inbox)
    assert turns(a, b, c, d) == [1, 1, 0, 0]
    moves.leave(b)
    assert turns(a, b, c, d) == [0, 0, 1, 0]
    moves.leave(d)  # it ended where it was
    moves.leave(a)
    moves.leave(a)
    assert turns(a, b, c, d) == [0, 0, 0, 0]
    moves.ask(a)
    assert asyncio.run(a.take()) == [MayMove()]


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5))), st.integers(1, 3))
def test_no_more_than_allowed_move_and_nobody_is_forgotten(steps: list[tuple[bool, int]], max_at_once: int) -> None:
    moves, inboxes = MigrationSlots(max_at_once), [Mailbox[Event]() for _ in range(6)]
    wanting, moving = [], set()
    for asks, number in steps:
        if asks and number not in wanting and number not in moving:
            wanting.append(number)
        elif not asks:
            wanting = [n for n in wanting if n != number]
            moving.discard(number)
        (moves.ask if asks else moves.leave)(inboxes[number])
        told = {n for n, num in enumerate(turns(*inboxes)) if num}
        expected = set(wanting[: max_at_once - len(moving)])
        assert told == expected
        wanting = [n for n in wanting if n not in told]
        moving |= told
        assert len(moving) <= max_at_once


def test_all_routers_together_move_no_more_than_one_would() -> None:
    routers = [MigrationSlots(4, lambda: 2) for _ in range(2)]
    inboxes = [[Mailbox[Event]() for _ in range(4)] for _ in routers]
    for moves, own in zip(routers, inboxes, strict=True):
        for inbox in own:
            moves.ask(inbox)
    assert [turns(*own) for own in inboxes] == [[1, 1, 0, 0]] * 2


def test_each_of_many_routers_may_move_one() -> None:
    moves, inbox = MigrationSlots(4, lambda: 8), Mailbox[Event]()
    moves.ask(inbox)
    assert turns(inbox) == [1]
