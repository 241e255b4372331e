"""How much is placed at once: enough that no worker runs idle, and no more."""

from __future__ import annotations

import heapq
import math
from collections import Counter, deque
from dataclasses import replace
from itertools import count
from random import Random

import pytest

from router.policy.gate import Room, UnderWay, places_of_one
from router.policy.turns import TurnQueue, Waiting
from tests.support.fairness import jain

ROOM = Room(num_computing=2, tokens_per_s=1000.0, num_decode=1, num_places=64, most_pages=100, page_size=16)


def may_follow(under_way: UnderWay, room: Room = ROOM, *, tokens: int = 100, sequences: int = 1) -> bool:
    return under_way.may_follow(tokens, sequences, room)


def test_two_prompts_for_each_worker_wait_there() -> None:
    assert may_follow(UnderWay(num_requests=9, num_ahead=3, tokens_ahead=100_000))
    assert not may_follow(UnderWay(num_requests=9, num_ahead=4, tokens_ahead=100_000))


def test_of_short_prompts_as_many_as_take_a_quarter_of_a_second() -> None:
    assert may_follow(UnderWay(num_requests=90, num_ahead=49, tokens_ahead=490, num_sequences=1))
    assert not may_follow(UnderWay(num_requests=90, num_ahead=50, tokens_ahead=500, num_sequences=1))


def test_those_behind_which_it_does_not_wait_do_not_count() -> None:
    """Two long prompts are ahead, and due later than the short one that comes."""
    one = replace(ROOM, num_computing=1)
    under_way = UnderWay(num_requests=9, num_ahead=2, tokens_ahead=100_000, turns_ahead=[50.0, 60.0])
    assert not under_way.may_follow(100, 1, one, turn=61.0)
    assert under_way.may_follow(100, 1, one, turn=59.0)
    under_way = UnderWay(num_requests=9, num_ahead=3, tokens_ahead=100_000, turns_ahead=[3.0, 50.0, 60.0])
    assert under_way.may_follow(100, 1, one, turn=4.0)
    assert not under_way.may_follow(100, 1, one, turn=50.0)


def test_before_the_speed_is_known_their_number_counts() -> None:
    assert not may_follow(UnderWay(num_requests=4, num_ahead=4), replace(ROOM, tokens_per_s=0.0))


def test_as_many_as_decode_has_places_and_as_leave_theirs_until_the_first_token() -> None:
    """Of 64 sequences that stay for 8 seconds one leaves every eighth of a second."""
    unknown, known = ROOM, replace(ROOM, place_s=8.0)

    def most(room: Room, *, tokens: int = 100, ahead: int = 0) -> int:
        numbers = range(64, 200)
        at = [UnderWay(num_requests=n, num_sequences=n, tokens_ahead=ahead, num_ahead=ahead > 0) for n in numbers]
        may = [n for n, u in zip(numbers, at, strict=True) if u.may_follow(tokens, 1, room)]
        return 1 + max(may, default=63)

    assert most(unknown, tokens=4000) == 64
    assert not may_follow(UnderWay(num_requests=64, num_sequences=64), unknown)
    assert most(known, tokens=1000) == 64 + 8, "its first token comes in a second"
    assert most(known, tokens=1000, ahead=2000) == 64 + 16, "two workers compute what is ahead in another second"
    assert most(replace(known, tokens_per_s=0.0), tokens=1000) == 64
    assert may_follow(UnderWay(num_requests=80, num_sequences=80), sequences=0), "pooled: decode has nothing to do"


@pytest.mark.parametrize(
    ("prompt_s", "place_s", "num_places"),
    [(0.02, 4.0, 64), (0.1, 4.0, 64), (0.2, 1.0, 8), (0.01, 20.0, 64), (0.5, 2.0, 4)],
)
def test_places_are_neither_waited_for_nor_empty(prompt_s: float, place_s: float, num_places: int) -> None:
    """Of 400 requests that come at once, in virtual time: one prefill worker, and batches that are soon full."""
    gaps, took_s = served(400, prompt_s, place_s, num_places)
    warm = gaps[2 * num_places :]  # before that it is not known how long sequences stay
    assert sum(warm) / len(warm) <= place_s / 25 + prompt_s / 2
    ideal_s = 400 * max(prompt_s, place_s / num_places)
    assert took_s <= 1.15 * ideal_s + place_s + prompt_s


def served(num: int, prompt_s: float, place_s: float, num_places: int) -> tuple[list[float], float]:
    """From first to second token of each, in their order, and when all have ended."""
    rng, now_s, numbers = Random(1), 0.0, count()
    events: list[tuple[float, int, str, int]] = []
    under_way, mean_s, num_free = UnderWay(), 0.0, num_places
    at_prefill, for_a_place, first_s, stayed_s = deque[int](), deque[int](), dict[int, float](), dict[int, float]()
    gaps, to_come, is_computing = dict[int, float](), deque(range(num)), False
    while True:
        room = Room(1, 100 / prompt_s, 1, num_places, 10**6, 16, place_s=mean_s)
        while to_come and under_way.may_follow(100, 1, room):
            at_prefill.append(to_come.popleft())
            under_way.num_requests += 1
            under_way.num_sequences += 1
            under_way.num_ahead += 1
            under_way.tokens_ahead += 100
        if at_prefill and not is_computing:
            is_computing = True
            under_way.num_ahead -= 1
            under_way.tokens_ahead -= 100
            heapq.heappush(events, (now_s + prompt_s, next(numbers), "computed", at_prefill.popleft()))
        while for_a_place and num_free:
            one, num_free = for_a_place.popleft(), num_free - 1
            gaps[one], stays_s = now_s - first_s[one], place_s * rng.uniform(0.5, 1.5)
            stayed_s[one] = stays_s
            heapq.heappush(events, (now_s + stays_s, next(numbers), "ended", one))
        if not events:
            return [gaps[one] for one in range(num)], now_s
        now_s, _, what, one = heapq.heappop(events)
        if what == "computed":
            is_computing, first_s[one] = False, now_s
            for_a_place.append(one)
        else:
            mean_s += (1 / 16 if mean_s else 1.0) * (stayed_s[one] - mean_s)
            num_free += 1
            under_way.num_requests -= 1
            under_way.num_sequences -= 1


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


# -- several routers


def test_what_others_leave_is_taken() -> None:
    assert places_of_one(16, 1, 0) == 16
    assert places_of_one(16, 2, 0) == 16, "the other has nothing"
    assert places_of_one(16, 2, 3) == 13
    assert places_of_one(16, 2, 8) == places_of_one(16, 2, 40) == 8, "its share, whatever the others have"
    assert places_of_one(3, 2, 3) == 1.5


def test_sequences_at_a_worker_that_gets_nothing_new_take_no_place_of_others() -> None:
    """Eight are at a silent worker, whose own eight places are no longer counted: the other worker's are free."""
    places = places_of_one(8, 1, 0, num_apart=8)
    room = replace(ROOM, num_places=places)
    assert may_follow(UnderWay(num_requests=15, num_sequences=15), room)
    assert not may_follow(UnderWay(num_requests=16, num_sequences=16), room)
    assert places_of_one(8, 2, 6, num_apart=3) == 7
    assert places_of_one(0, 1, 0, num_apart=8) == 0, "there is no worker"


WEIGHTS = {"a": 1.0, "b": 1.0, "c": 2.0}


class Routers:
    """Two of them before 16 places, each with turns of its own. What one knows of the other is of the round before.

    Args:
        backlogs: of each router, how many requests of which tenant wait there at any time.
    """

    def __init__(self, *backlogs: dict[str, int]) -> None:
        self.queues = [TurnQueue(10.0) for _ in backlogs]
        self.placed: list[list[tuple[str, int]]] = [[] for _ in backlogs]  # tenant, and rounds that are left
        self.got = Counter[str]()
        self.busy: list[int] = []
        self.num_placed: list[int] = []
        self.numbers = count()
        for router, backlog in enumerate(backlogs):
            for tenant, num in backlog.items():
                self.wait(router, tenant, num)

    def wait(self, router: int, tenant: str, num: int) -> None:
        for _ in range(num):
            self.queues[router].enter(Waiting(tenant, WEIGHTS[tenant], 0, "", math.inf, 0.0, num_tokens=10))

    def run(self, num_rounds: int) -> None:
        for _ in range(num_rounds):
            known = [len(each) for each in self.placed]
            for router, (queue, placed) in enumerate(zip(self.queues, self.placed, strict=True)):
                room = replace(ROOM, num_places=places_of_one(16, 2, known[1 - router]), num_routers=2)
                while (entry := queue.first()) and UnderWay(len(placed), len(placed)).may_follow(1, 1, room):
                    queue.take(entry)
                    self.wait(router, entry.owner, 1)
                    placed.append((entry.owner, 4 + next(self.numbers) % 9))
                    self.got[entry.owner] += 1
            self.busy.append(min(16, sum(map(len, self.placed))))
            self.num_placed = list(map(len, self.placed))
            for placed in self.placed:
                placed[:] = [(tenant, left - 1) for tenant, left in placed if left > 1]

    def jain(self) -> float:
        shares = [num / WEIGHTS[tenant] for tenant, num in self.got.items()]
        return jain(shares)


def test_connections_that_all_lie_with_one_router_use_all_places() -> None:
    routers = Routers({"a": 30}, {})
    routers.run(100)
    assert set(routers.busy) == {16}


def test_who_had_more_than_its_share_gives_it_back() -> None:
    routers = Routers({"a": 30}, {})
    routers.run(20)
    assert routers.num_placed == [16, 0], "as many as there are places"
    routers.wait(1, "b", 30)
    routers.run(20)
    assert all(8 <= num <= 13 for num in routers.num_placed), routers.num_placed
    assert set(routers.busy) == {16}


def test_tenants_that_wait_at_each_get_what_their_weights_say() -> None:
    """However many of their requests lie where."""
    routers = Routers({"a": 30, "b": 3, "c": 8}, {"a": 4, "b": 20, "c": 5})
    routers.run(400)
    assert routers.jain() >= 0.99
    assert set(routers.busy) == {16}
    alone = Routers({"a": 30, "c": 30}, {"b": 30})
    alone.run(400)
    assert alone.jain() < 0.99, (
        "one that has a router for itself gets that router's places, as long as they do not tell each other"
    )


def test_of_a_long_prompt_pages_count_as_far_as_the_next_token_sees_them() -> None:
    """120 tokens of 16 to a page; behind them 40 are seen, which lie in three pages."""
    under_way = UnderWay(num_requests=1, num_ungranted=99)
    for most_pages, fits in ((2, False), (3, True)):
        assert under_way.may_follow(120, 1, replace(ROOM, most_pages=most_pages, window=40)) is fits
        assert not under_way.may_follow(120, 1, replace(ROOM, most_pages=most_pages))
    # Of a mixed model: eight pages for the layers that see all, and two for each of the three places for the others.
    for most_pages, fits in ((13, False), (14, True)):
        room = replace(ROOM, most_pages=most_pages, window=40, num_windowed=2)
        assert under_way.may_follow(120, 1, room) is fits
