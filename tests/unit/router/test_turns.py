"""Whose turn it is: priorities with ageing, tenants by weight, sessions by what they got, deadlines, the oldest."""

from __future__ import annotations

import math
import random
import time
from collections import OrderedDict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.policy import turns
from router.policy.turns import MAX_SESSIONS, MAX_TENANTS, OLDEST_EVERY, TurnQueue, Waiting
from tests.support.fairness import jain
from tests.support.work import num_instructions

AGEING_S = 10.0


def waiting(
    owner: str = "a",
    *,
    weight: float = 1.0,
    priority: int = 0,
    session: str = "",
    due_s: float = math.inf,
    at_s: float = 0.0,
    tokens: int = 10,
) -> Waiting:
    return Waiting(owner, weight, priority, session, due_s, at_s, tokens)


def queue_of(*entries: Waiting) -> TurnQueue:
    queue = TurnQueue(AGEING_S)
    for entry in entries:
        queue.enter(entry)
    return queue


def take(queue: TurnQueue) -> Waiting:
    entry = queue.first()
    assert entry is not None
    queue.take(entry)
    return entry


def taken(queue: TurnQueue) -> list[Waiting]:
    return [take(queue) for _ in range(queue.num_waiting)]


# -- one tenant


def test_equals_go_in_the_order_in_which_they_came() -> None:
    entries = [waiting(at_s=n) for n in range(10)]
    assert taken(queue_of(*entries)) == entries
    assert queue_of().first() is None


def test_who_is_due_sooner_goes_first() -> None:
    late, never, soon = waiting(due_s=9.0), waiting(), waiting(due_s=5.0)
    assert taken(queue_of(late, never, soon)) == [soon, late, never]


def test_a_more_urgent_level_goes_first_until_others_have_waited_for_as_long_as_it_is_worth() -> None:
    old, urgent = waiting(at_s=0.0), waiting(priority=-1, at_s=AGEING_S - 1)
    assert taken(queue_of(old, urgent)) == [urgent, old]
    old, urgent = waiting(at_s=0.0), waiting(priority=-1, at_s=AGEING_S + 1)
    assert taken(queue_of(old, urgent)) == [old, urgent]


def test_the_session_that_has_got_least_goes_first() -> None:
    queue = queue_of()
    greedy, modest = waiting(session="greedy"), waiting(session="modest")
    for entry in (greedy, modest):
        queue.enter(entry)
        queue.take(entry)
    queue.charge(greedy, 1000)
    again, other, own = waiting(session="greedy"), waiting(session="modest", at_s=1.0), waiting(at_s=2.0)
    for entry in (again, other, own):
        queue.enter(entry)
    assert taken(queue) == [own, other, again]


def test_what_a_session_gets_while_it_waits_counts() -> None:
    queue = queue_of()
    first, second = waiting(session="s", at_s=0.0), waiting(session="t", at_s=1.0)
    queue.enter(first)
    queue.enter(second)
    queue.charge(waiting(session="s"), 5)  # another request of it is under way
    assert taken(queue) == [second, first]


def test_every_fourth_turn_is_for_the_oldest_however_much_its_session_has_got() -> None:
    queue = queue_of()
    old = waiting(session="greedy")
    queue.enter(old)
    queue.charge(old, 1_000_000)
    for number in range(20):
        queue.enter(waiting(at_s=1.0 + number))
    order = taken(queue)
    assert order.index(old) == OLDEST_EVERY - 1


def test_who_leaves_before_its_turn_is_passed_over() -> None:
    entries = [waiting(at_s=n, session=f"s{n}") for n in range(100)]
    queue = queue_of(*entries)
    for entry in entries[::2]:
        queue.leave(entry)
        queue.leave(entry)  # once more changes nothing
    assert queue.num_waiting == 50
    assert taken(queue) == entries[1::2]
    assert (queue.num_waiting, queue.num_tokens, queue.first()) == (0, 0, None)


# -- tenants


def test_tenants_take_turns_by_what_they_got() -> None:
    many = [waiting("a", at_s=n) for n in range(6)]
    few = [waiting("b", at_s=10 + n) for n in range(3)]
    assert [entry.owner for entry in taken(queue_of(*many, *few))] == list("ababab") + list("aaa")


def test_a_tenant_of_twice_the_weight_gets_twice_as_much() -> None:
    entries = [waiting("a", weight=2.0) for _ in range(40)] + [waiting("b") for _ in range(40)]
    queue = queue_of(*entries)
    first = [take(queue).owner for _ in range(30)]
    assert first.count("a") == 20


def test_answers_count_as_prompts_do() -> None:
    queue = queue_of(*(waiting(owner) for owner in "ab" for _ in range(10)))
    chatty = take(queue)
    queue.charge(chatty, 30)
    order = [take(queue).owner for _ in range(5)]
    other = "b" if chatty.owner == "a" else "a"
    assert order[:4] == [other] * 4, "each of its prompts has 10 tokens: it had 40 less"


def test_who_comes_back_has_saved_nothing_up() -> None:
    queue = queue_of(*(waiting("busy") for _ in range(100)))
    for _ in range(50):
        take(queue)
    for number in range(50):
        queue.enter(waiting("new", at_s=100.0 + number))
    order = [take(queue).owner for _ in range(20)]
    assert order.count("new") == 10


def test_who_comes_when_nobody_waits_owes_nothing() -> None:
    queue = queue_of(*(waiting("busy") for _ in range(50)))
    taken(queue)
    queue.enter(waiting("busy", at_s=1.0))
    queue.enter(waiting("new", at_s=2.0))
    queue.enter(waiting("busy", at_s=3.0))
    queue.enter(waiting("new", at_s=4.0))
    assert sorted(entry.owner for entry in (take(queue), take(queue))) == ["busy", "new"]


@pytest.mark.long
@settings(max_examples=60, deadline=None)
@given(
    weights=st.lists(st.sampled_from([0.5, 1.0, 2.0, 4.0]), min_size=2, max_size=6),
    places=st.integers(1, 16),
    seed=st.integers(0, 1 << 30),
)
def test_what_tenants_with_a_backlog_get_differs_by_no_more_than_the_bound(
    weights: list[float], places: int, seed: int
) -> None:
    """Requests hold a place while their answers come token by token, as in decode's batch."""
    rng = random.Random(seed)
    queue, under_way = queue_of(), list[tuple[Waiting, int]]()
    got = dict.fromkeys(map(str, range(len(weights))), 0.0)
    longest, most_output = 200, 100

    def refill(owner: int) -> None:
        scale = 1 + owner  # who asks for more at once must not get more
        queue.enter(waiting(str(owner), weight=weights[owner], tokens=rng.randint(1, longest // len(weights) * scale)))

    for owner in range(len(weights)):
        for _ in range(3):
            refill(owner)
    for _ in range(3000):
        while len(under_way) < places:
            entry = take(queue)
            refill(int(entry.owner))
            got[entry.owner] += entry.num_tokens / entry.weight
            under_way.append((entry, rng.randint(1, most_output)))
        left = []
        for entry, num_left in under_way:
            queue.charge(entry, 1)
            got[entry.owner] += 1 / entry.weight
            if num_left > 1:
                left.append((entry, num_left - 1))
        under_way = left
        bound = 2 * (longest + places * most_output) / min(weights)
        assert max(got.values()) - min(got.values()) <= bound
    assert jain(list(got.values())) >= 0.95


def test_a_flood_of_one_tenant_delays_another_by_one_turn() -> None:
    queue = queue_of(*(waiting("flood", at_s=n) for n in range(1000)))
    for _ in range(100):
        take(queue)
    queue.enter(waiting("calm", at_s=2000.0))
    assert "calm" in [take(queue).owner for _ in range(2)]


@pytest.mark.long
@pytest.mark.parametrize("what", ["tenants", "sessions"])
def test_what_is_remembered_is_bounded(what: str) -> None:
    queue = queue_of()
    for number in range(2 * MAX_SESSIONS):
        entry = waiting(f"t{number}" if what == "tenants" else "a", session=f"s{number}")
        queue.enter(entry)
        queue.take(entry)
    assert len(queue._tenants) <= MAX_TENANTS
    assert len(queue._sessions) <= MAX_SESSIONS


def test_nobody_is_forgotten_who_waits_however_many_do() -> None:
    entries = [waiting(f"t{number}") for number in range(MAX_TENANTS + 2)]
    queue = queue_of(*entries)
    for entry in entries:
        queue.leave(entry)
    assert queue.num_waiting == 0


def test_who_comes_again_when_it_was_forgotten_goes_before_none_that_got_less() -> None:
    """Somebody waited all the while, so the level has kept the line in which it waited before."""
    queue = queue_of(waiting("b"), waiting("b"))
    queue.charge(waiting("a"), 1000)
    before = waiting("a")
    queue.enter(before)
    queue.leave(before)
    for number in range(MAX_TENANTS):
        queue.learn(f"t{number}", 0.0, 0.0)
    queue.charge(waiting("b"), 5000)
    entries = [waiting("a", tokens=2000) for _ in range(6)]
    for entry in entries:
        queue.enter(entry)
    assert [take(queue).owner for _ in range(4)].count("b") == 2, "it is behind once it has got more"


def test_levels_and_lines_of_those_that_left_are_forgotten() -> None:
    queue = queue_of(waiting("constant"))
    for number in range(5000):
        entry = waiting(f"t{number % 7}", session=f"s{number}", at_s=float(number), priority=number % 3)
        queue.enter(entry)
        queue.leave(entry)
    assert len(queue._by_served) <= 8
    line = queue._levels[0]._lines["constant"]
    assert len(line.sessions) == 1
    assert sum(len(each.sessions) for each in queue._levels[0]._lines.values()) < 7 * 40
    assert len(queue._levels) == len(queue._by_least) == 1


def test_a_level_that_is_never_looked_at_forgets_those_that_left() -> None:
    queue = queue_of(waiting("urgent", priority=-1), waiting("constant"))
    for number in range(1000):
        entry = waiting(f"t{number}", at_s=float(number))
        queue.enter(entry)
        queue.leave(entry)
    level = queue._levels[0]
    assert max(len(level._lines), len(level._by_served), len(level._by_key)) < 40
    assert [entry.owner for entry in taken(queue)] == ["urgent", "constant"]


def test_a_turn_costs_little_among_many() -> None:
    """A bound with much slack: 16,384 that wait of 1,024 tenants."""
    queue = queue_of(*(waiting(f"t{n % 1024}", session=f"s{n % 97}", at_s=float(n)) for n in range(16_384)))
    begin = time.thread_time()
    for _ in range(1000):
        take(queue)
    assert (time.thread_time() - begin) / 1000 < 1e-3


def test_in_front_of_a_tenant_is_its_own_and_the_others_share() -> None:
    queue = queue_of(*(waiting("flood") for _ in range(100)), waiting("calm"))
    assert queue.tokens_in_front("calm", 1.0) == 20
    assert queue.tokens_in_front("flood", 1.0) == 1010
    assert queue.tokens_in_front("new", 1.0) == 0


class Walked(TurnQueue):
    """What is asked of all tenants, by looking at each."""

    def of_all(self, owner: str, weight: float) -> float:
        waiting = [each for each in self._tenants.values() if each.num_waiting]
        own = next((each.num_tokens for each in waiting if each.owner == owner), 0)
        others = sum(each.weight for each in waiting if each.owner != owner)
        return min(float(self.num_tokens), own * (1 + others / weight))


@pytest.mark.long
@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32))
def test_what_is_counted_of_all_tenants_is_what_they_have(seed: int) -> None:
    """Tenants come, wait, change their weights, are served here and elsewhere, lifted and forgotten."""
    draw, queue, there = random.Random(seed), Walked(AGEING_S), list[Waiting]()
    served: OrderedDict[str, None] = OrderedDict()  # the least recently met first
    most, turns.MAX_TENANTS = turns.MAX_TENANTS, 5
    try:
        for _ in range(120):
            owner, what, of_whom = f"t{draw.randrange(9)}", draw.randrange(5), {each.owner for each in there}
            if what in (0, 3) or (what == 1 and not there):
                there.append(waiting(owner, weight=draw.choice([0.5, 1.0, 3.0]), tokens=draw.randrange(1, 50)))
                queue.enter(there[-1])
            elif what == 1:
                queue.leave(there.pop(draw.randrange(len(there))))
                owner = ""
            elif what == 2:
                queue.learn(owner, draw.random() * 100, draw.random())
            else:
                owner, least = "", draw.random() * 100
                queue.lift(least)
                assert all(each.served >= least for each in queue._tenants.values() if each.num_waiting)
            if owner:
                idle = [each for each in served if each not in of_whom]
                for gone in idle[: max(0, len(served) - 4)] if owner not in served else ():
                    del served[gone]
                served[owner] = None
                served.move_to_end(owner)
            assert set(queue._tenants) == set(served), "who was met least recently was forgotten"
            for each in (*served, "new"):
                assert queue.tokens_in_front(each, 2.0) == pytest.approx(queue.of_all(each, 2.0))
    finally:
        turns.MAX_TENANTS = most


def test_nothing_on_a_requests_way_costs_more_with_more_tenants() -> None:
    """All of whom the queue remembers wait. A bound with much slack: looking at each tenant would take 0.3 ms."""
    queue = queue_of(*(waiting(f"t{number}") for number in range(MAX_TENANTS)))
    begin = time.thread_time()
    for number in range(1000):
        queue.tokens_in_front("t7", 1.0)
        queue.lift(0.0)
        queue.learn(f"new{number}", 0.0, 0.0)
    assert (time.thread_time() - begin) / 1000 < 1e-4


def test_the_oldest_gives_its_turn_to_who_is_due_first_where_it_is_asked_to() -> None:
    queue = TurnQueue(AGEING_S)
    queue.enter(old := waiting(due_s=90.0))
    for number in range(4):
        queue.enter(waiting(at_s=1.0 + number, due_s=10.0 + number))
    for _ in range(OLDEST_EVERY - 1):
        entry = queue.first()
        assert entry is not None
        queue.take(entry)
    assert queue.first() is old
    soonest = queue.first(oldest=False)
    assert soonest is not None
    assert soonest.due_s == 13.0


def walked(queue: TurnQueue, *, oldest: bool) -> Waiting | None:
    """The first of all levels, by looking at each."""
    found = [level.first(queue._attained, oldest=oldest) for level in queue._levels.values()]
    return min(found, key=lambda each: (each.arrived_s + each.priority * AGEING_S, each.number), default=None)


@pytest.mark.long
@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32))
def test_the_first_of_all_levels_is_found_whatever_has_changed(seed: int) -> None:
    """Requests enter, leave and have their turns, sessions and tenants are served; levels are worth little waiting."""
    draw, queue, there = random.Random(seed), queue_of(), list[Waiting]()
    for now in range(200):
        what = draw.choice(["enter", "enter", "leave", "take", "charge", "learn"])
        if what == "enter":
            entry = waiting(
                f"t{draw.randrange(3)}", priority=draw.randrange(-8, 8), session=draw.choice(["", "s", "t"]),
                due_s=draw.choice([math.inf, now + draw.random() * 50]), at_s=now - draw.randrange(40),
            )  # fmt: skip
            there.append(entry)
            queue.enter(entry)
        elif what == "learn":
            queue.learn(f"t{draw.randrange(3)}", draw.random() * 100, 0.0)
        elif there:
            entry = draw.choice(there)
            if what == "charge":
                queue.charge(entry, draw.randrange(1, 50))
            elif what == "leave" or (first := queue.first()) is None:
                queue.leave(entry)
                there.remove(entry)
            else:
                queue.take(first)
                there.remove(first)
        if draw.random() < 0.5:
            oldest = draw.random() < 0.5
            assert queue.first(oldest=oldest) is walked(queue, oldest=oldest)


def test_a_look_costs_no_more_with_more_levels() -> None:
    """Each request has a priority of its own."""

    def work(num: int) -> int:
        queue = queue_of(*(waiting(priority=number, at_s=float(number)) for number in range(num)))
        return num_instructions(queue.first)

    assert work(1024) <= work(16)


def test_levels_are_looked_at_as_far_as_their_oldest_could_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """In each level an old request waits behind a new one that is due sooner."""
    queue = TurnQueue(AGEING_S)
    for number in range(100):
        queue.enter(waiting(priority=number, at_s=0.0))
        queue.enter(waiting(priority=number, at_s=4.5 * AGEING_S, due_s=1.0))
    looked = list[int]()

    def attained(entry: Waiting) -> float:
        looked.append(entry.priority)
        return 0.0

    monkeypatch.setattr(queue, "_attained", attained)
    queue.first()
    assert looked == [0, 1, 2, 3, 4]
