"""How much is placed at once: enough that no worker runs idle, and no more."""

from __future__ import annotations

from dataclasses import replace

import pytest

from router.policy.gate import Room, UnderWay

ROOM = Room(num_computing=2, tokens_per_s=1000.0, num_decode=1, num_places=64, most_pages=100, page_size=16)


def may_follow(under_way: UnderWay, room: Room = ROOM, *, tokens: int = 100, sequences: int = 1) -> bool:
    return under_way.may_follow(tokens, sequences, room)


def test_two_prompts_for_each_worker_wait_there() -> None:
    assert may_follow(UnderWay(num_requests=9, num_ahead=3, tokens_ahead=100_000))
    assert not may_follow(UnderWay(num_requests=9, num_ahead=4, tokens_ahead=100_000))


def test_of_short_prompts_as_many_as_take_a_quarter_of_a_second() -> None:
    assert may_follow(UnderWay(num_requests=90, num_ahead=49, tokens_ahead=490, num_sequences=1))
    assert not may_follow(UnderWay(num_requests=90, num_ahead=50, tokens_ahead=500, num_sequences=1))


def test_before_the_speed_is_known_their_number_counts() -> None:
    assert not may_follow(UnderWay(num_requests=4, num_ahead=4), replace(ROOM, tokens_per_s=0.0))


def test_a_quarter_more_than_decode_has_places() -> None:
    assert may_follow(UnderWay(num_requests=79, num_sequences=79))
    assert not may_follow(UnderWay(num_requests=80, num_sequences=80))
    assert may_follow(UnderWay(num_requests=80, num_sequences=80), sequences=0), "pooled: decode has nothing to do"


def test_without_room_two_wait_for_pages() -> None:
    small = replace(ROOM, most_pages=5)
    assert may_follow(UnderWay(num_requests=9, num_ungranted=1), small)
    assert not may_follow(UnderWay(num_requests=9, num_ungranted=2), small)
    assert may_follow(UnderWay(num_requests=9, num_ungranted=2), small, tokens=80)


@pytest.mark.parametrize("room", [ROOM, replace(ROOM, num_places=0.25, most_pages=0)])
def test_who_has_placed_nothing_places_one(room: Room) -> None:
    assert may_follow(UnderWay(), room, tokens=10**6, sequences=16)


@pytest.mark.parametrize("room", [replace(ROOM, num_computing=0), replace(ROOM, num_decode=0, num_places=0)])
def test_without_workers_nobody_is_held_back(room: Room) -> None:
    """What finds a worker says how long it waits for one, and what is missing."""
    assert may_follow(UnderWay(num_requests=9, num_ahead=9, tokens_ahead=9999, num_sequences=99), room)


def test_routers_share_the_room() -> None:
    two = replace(ROOM, num_routers=2)
    assert may_follow(UnderWay(num_requests=9, num_ahead=1, tokens_ahead=10_000), two)
    assert not may_follow(UnderWay(num_requests=9, num_ahead=2, tokens_ahead=10_000), two)
