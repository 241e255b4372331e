"""Turns at several routers: tenants with a backlog get what their weights say, wherever their connections lie."""

from __future__ import annotations

import math
from collections import Counter, deque
from dataclasses import dataclass, field
from itertools import count
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.http.turn_exchange import decoded, encoded
from router.lifecycle.turns import Turn, Turns
from router.policy.gate import Room, places_of_one
from router.policy.other_turns import EVERY_S, FRESH_S, MOST_TOLD, Next, OtherTurns, TurnNews
from router.policy.turns import Served, TurnQueue, Waiting
from router.request.mailbox import Mailbox
from router.request.request import Request
from router.request.targets import Targets
from router.request.tenant import Tenant
from tandem.core.clock import VirtualClock
from tandem.core.sampling import SamplingParams
from tests.support.fairness import jain

ROUND_S = 0.01
AGEING_S = 10.0


@dataclass
class Load:
    """Of one tenant.

    Attributes:
        waiting: of each router, how many of its requests wait there at any time.
        prompt, output: tokens of each request, at most.
    """

    waiting: tuple[int, ...]
    weight: float = 1.0
    prompt: int = 20
    output: int = 20


@dataclass
class Sent:
    """A request that has been placed."""

    turn: Turn
    router: int
    tenant: str
    num_left: int  # tokens of its prompt, then of its answer
    is_once: bool


@dataclass
class World:
    """Routers before workers that compute `prompt_tokens` of prompts in a round, and have so many places, each of which
    gives a token in a round. A router hears of the others' places a round later.

    Attributes:
        are_told: whether routers tell each other of their turns.
        word_s: that a word takes to the others.
        silent: routers that stand still.
    """

    loads: dict[str, Load]
    num_places: int = 16
    prompt_tokens: int = 10_000
    seed: int = 0
    are_told: bool = True
    word_s: float = 0.0
    clock: VirtualClock = field(default_factory=VirtualClock)
    got: Counter[str] = field(default_factory=Counter)
    silent: set[int] = field(default_factory=set)
    busy: list[int] = field(default_factory=list)  # places, by round
    num_computed: list[int] = field(default_factory=list)  # tokens of prompts, by round
    words: deque[tuple[float, int, TurnNews]] = field(default_factory=deque)  # under way: when it is there, who tells

    def __post_init__(self) -> None:
        self.rng, self.numbers = Random(self.seed), count()
        num_routers = len(next(iter(self.loads.values())).waiting)
        self.placed = [0] * num_routers  # sequences of each
        self.known = [0] * num_routers  # the same, as the others know
        self.prompts, self.for_a_place, self.decoding = deque[Sent](), deque[Sent](), list[Sent]()
        self.turns = [self.make_turns(router) for router in range(num_routers)]
        self.waiting: list[list[Sent]] = [[] for _ in range(num_routers)]
        for router in range(num_routers):
            for tenant, load in self.loads.items():
                for _ in range(load.waiting[router]):
                    self.join(router, tenant)

    def make_turns(self, router: int) -> Turns:
        return Turns(lambda: self.room(router), AGEING_S, self.clock)

    def start_again(self, router: int) -> None:
        """One without requests."""
        assert not self.waiting[router]
        self.turns[router] = self.make_turns(router)

    def room(self, router: int) -> Room:
        num_others = sum(num for other, num in enumerate(self.known) if other != router)
        num_routers = len(self.known)
        return Room(
            num_computing=1,
            tokens_per_s=self.prompt_tokens / ROUND_S,
            num_decode=1,
            num_places=places_of_one(self.num_places, num_routers, num_others),
            most_pages=10**6,
            page_size=16,
            num_routers=num_routers,
        )

    def join(self, router: int, tenant: str, *, once: bool = False) -> None:
        """`once`: no other comes when it has its turn."""
        load = self.loads[tenant]
        num_tokens = self.rng.randint(1, load.prompt)
        request = Request(
            f"request-{next(self.numbers)}",
            (0,) * num_tokens,
            SamplingParams(),
            self.clock.now(),
            targets=Targets(1.0, 0.1),
            tenant=Tenant(tenant, tenant, "", weight=load.weight),
        )
        self.waiting[router].append(
            Sent(self.turns[router].join(request, Mailbox()), router, tenant, num_tokens, is_once=once)
        )

    def run(self, seconds: float) -> None:
        every = round(EVERY_S / ROUND_S)
        for number in range(round(seconds / ROUND_S)):
            self.clock.advance(ROUND_S)
            self.hear()
            for router in range(len(self.turns)):
                if router not in self.silent:
                    if self.are_told and number % every == router:
                        self.tell(router)
                    self.turns[router].look()
                    self.place(router)
            self.compute()
            self.decode()
            self.known = list(self.placed)

    def tell(self, router: int) -> None:
        self.words.append((self.clock.now() + self.word_s, router, self.turns[router].tell()))
        self.hear()

    def hear(self) -> None:
        while self.words and self.words[0][0] <= self.clock.now():
            _, router, news = self.words.popleft()
            for other, turns in enumerate(self.turns):
                if other != router and other not in self.silent:
                    turns.hear(f"router-{router}", news)

    def place(self, router: int) -> None:
        """Those whose turn has come. Others come in their place."""
        while come := [sent for sent in self.waiting[router] if sent.turn.has_come]:
            self.waiting[router] = [sent for sent in self.waiting[router] if not sent.turn.has_come]
            for sent in come:
                self.got[sent.tenant] += sent.num_left
                self.prompts.append(sent)
                self.placed[router] += 1
                if not sent.is_once:
                    self.join(router, sent.tenant)

    def compute(self) -> None:
        left = self.prompt_tokens
        while left and self.prompts:
            sent = self.prompts[0]
            sent.turn.begun(0)
            now = min(left, sent.num_left)
            sent.num_left -= now
            left -= now
            if not sent.num_left:
                self.for_a_place.append(self.prompts.popleft())
        self.num_computed.append(self.prompt_tokens - left)

    def decode(self) -> None:
        while self.for_a_place and len(self.decoding) < self.num_places:
            sent = self.for_a_place.popleft()
            sent.turn.granted()
            sent.num_left = self.rng.randint(1, self.loads[sent.tenant].output)
            self.decoding.append(sent)
        self.busy.append(len(self.decoding))
        for sent in self.decoding:
            sent.turn.charge(1)
            self.got[sent.tenant] += 1
            sent.num_left -= 1
            if not sent.num_left:
                self.placed[sent.router] -= 1
                sent.turn.end()
        self.decoding = [sent for sent in self.decoding if sent.num_left]

    def use(self) -> float:
        """The used part of what is short."""
        num = len(self.busy)
        return max(sum(self.busy) / self.num_places, sum(self.num_computed) / self.prompt_tokens) / num

    def shares(self) -> dict[str, float]:
        return {tenant: self.got[tenant] / load.weight for tenant, load in self.loads.items() if self.got[tenant]}

    def jain(self) -> float:
        return jain(list(self.shares().values()))


# -- fairness

CASES = {
    "each has a router for itself": {"a": Load((30, 0)), "b": Load((0, 30), weight=2.0)},
    "two at one router, one at the other": {"a": Load((30, 0)), "b": Load((30, 0)), "c": Load((0, 30))},
    "one at both": {"a": Load((30, 0)), "b": Load((30, 30))},
    "long prompts": {"a": Load((30, 0), prompt=200, output=10), "b": Load((0, 30), prompt=10, output=50)},
    "three routers": {"a": Load((9, 0, 9)), "b": Load((0, 30, 9), weight=2.0), "c": Load((0, 9, 0))},
}
DECODE, PREFILL = {"prompt_tokens": 10_000}, {"prompt_tokens": 40, "num_places": 64}
"""What is short: places in decode's batches, or the computation of prompts."""


@pytest.mark.long
@pytest.mark.parametrize(
    ("case", "short"),
    [
        *(pytest.param(case, DECODE, id=f"{case}-decode") for case in CASES),
        *(
            pytest.param(case, PREFILL, id=f"{case}-prefill", marks=[] if "long" in case else pytest.mark.faults)
            for case in CASES
        ),
    ],
)
def test_wherever_connections_lie_tenants_get_what_their_weights_say(case: str, short: dict[str, int]) -> None:
    world = World(CASES[case], **short)
    world.run(20.0)
    assert world.jain() >= 0.99, world.shares()
    assert world.use() >= 0.97, "who holds back leaves nothing idle"


@pytest.mark.parametrize("word_s", [0.0, 0.05, 0.25])
def test_two_routers_whose_words_are_as_old_as_a_turn_takes_divide_evenly_too(word_s: float) -> None:
    """The tenants, places and lengths of `tests/scenarios/test_turns_are_fair.py`, without a process that asks late."""
    loads = {
        "flood": Load((2, 22), prompt=50, output=96),
        "modest": Load((8, 0), prompt=200, output=16),
        "double": Load((12, 0), weight=2.0, prompt=100, output=48),
    }
    world = World(loads, num_places=4, word_s=word_s)
    world.run(10.0)
    assert world.jain() >= 0.95, world.shares()
    assert world.use() >= 0.97


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_without_a_word_of_each_other_they_do_not(case: str) -> None:
    world = World(CASES[case], are_told=False)
    world.run(20.0)
    assert world.jain() < 0.95, world.shares()


@pytest.mark.long
@settings(max_examples=4, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    num_routers=st.integers(2, 3),
    num_tenants=st.integers(2, 5),
    num_places=st.integers(4, 32),
    prompt_tokens=st.sampled_from([100, 1000]),
)
def test_what_tenants_with_a_backlog_get_differs_by_no_more_than_the_bound(
    seed: int, num_routers: int, num_tenants: int, num_places: int, prompt_tokens: int
) -> None:
    rng = Random(seed)
    loads = {}
    for number in range(num_tenants):
        waiting = [rng.choice([0, 4, 20]) for _ in range(num_routers)]
        waiting[rng.randrange(num_routers)] = 20
        loads[str(number)] = Load(tuple(waiting), rng.choice([1.0, 2.0]), rng.choice([5, 50]), rng.choice([5, 50]))
    world = World(loads, num_places, prompt_tokens, seed)
    world.run(20.0)
    longest = max(load.prompt for load in loads.values())
    most_output = max(load.output for load in loads.values())
    of_one_queue = 2 * (longest + num_places * most_output)
    in_a_second = world.got.total() / 20.0
    shares = world.shares().values()
    assert world.use() >= 0.95
    assert max(shares) - min(shares) <= of_one_queue + 3 * EVERY_S * in_a_second, world.shares()
    world.got.clear()
    world.run(20.0)
    assert world.jain() >= 0.95, world.shares()


@pytest.mark.long
def test_who_asks_now_and_then_costs_the_others_no_places() -> None:
    """Its requests wait for a moment each, and then nobody waits there."""
    world = World({"flood": Load((60, 0)), "calm": Load((0, 0))})
    for _ in range(200):
        world.join(1, "calm", once=True)
        world.run(0.13)
    assert world.use() >= 0.99


@pytest.mark.long
def test_who_comes_at_a_router_where_nobody_waits_has_saved_nothing_up() -> None:
    world = World({"flood": Load((30, 0)), "new": Load((0, 0))})
    world.run(20.0)
    for _ in range(60):
        world.join(1, "new")
    world.got.clear()
    world.run(5.0)
    assert world.jain() >= 0.98, world.shares()


def test_who_comes_is_lifted_to_the_least_of_all_that_wait() -> None:
    """More urgent ones have had turns meanwhile, of a tenant that has got much."""
    queue = TurnQueue(AGEING_S)
    turns = OtherTurns(queue, "here")
    turns.hear("other", TurnNews("there", 1, 1e6, Next("b", 0, 100.0), {}), 0.0)
    for now_s, counter in ((0.1, 100.0), (FRESH_S, 1e6)):
        entry = Waiting(f"new {now_s}", 1.0, 0, "", math.inf, now_s, 10)
        queue.enter(entry, turns.elsewhere(now_s))
        assert queue.served(entry.owner) == counter
        queue.leave(entry)


# -- silence


@pytest.mark.parametrize(("num_routers", "is_fresh"), [(2, False), (40, True)])
def test_with_many_routers_a_word_holds_for_as_long_as_three_of_them_take(num_routers: int, is_fresh: bool) -> None:
    """Each tells the others less often then; else nobody would ever wait for another router's turn."""
    queue = TurnQueue(AGEING_S)
    turns = OtherTurns(queue, "here")
    for number in range(num_routers - 1):
        turns.hear(f"router-{number}", TurnNews("there", 1, 0.0, Next("behind", 0, 0.0), {}), 0.0)
    entry = Waiting("ahead", 1.0, 0, "", math.inf, 0.0, 10)
    queue.enter(entry, turns.elsewhere(0.0))
    queue.learn("ahead", 1e6, 0.0)
    assert turns.go_first(entry, 0.5 * FRESH_S)
    assert turns.go_first(entry, 2.5 * EVERY_S * 39) is is_fresh
    assert not turns.go_first(entry, 3.5 * EVERY_S * 39)


@pytest.mark.long
def test_nobody_waits_for_a_router_that_says_nothing() -> None:
    world = World({"a": Load((30, 0)), "b": Load((0, 30))})
    world.run(5.0)
    world.silent.add(1)
    world.run(FRESH_S + 2.0)
    assert set(world.busy[-150:]) == {16}, "all places are used"


@pytest.mark.long
def test_who_waited_at_a_router_that_said_nothing_has_saved_nothing_up() -> None:
    world = World({"a": Load((30, 0)), "b": Load((0, 30))})
    world.run(5.0)
    world.silent.add(1)
    world.run(20.0)
    world.silent.clear()
    world.run(1.0)
    world.got.clear()
    world.run(10.0)
    assert world.jain() >= 0.98, world.shares()


@pytest.mark.long
def test_a_router_that_is_started_again_has_a_claim_to_no_more() -> None:
    world = World({"a": Load((30, 0)), "b": Load((30, 0))})
    world.run(30.0)
    world.start_again(1)
    world.loads["c"] = Load((0, 30))
    for _ in range(30):
        world.join(1, "c")
    world.run(1.0)
    world.got.clear()
    world.run(20.0)
    assert world.jain() >= 0.98, world.shares()


def test_who_goes_in_the_place_of_an_oldest_one_that_does_not_fit_waits_for_other_routers_too() -> None:
    clock, num_places = VirtualClock(), 0

    def room() -> Room:
        return Room(1, tokens_per_s=1e6, num_decode=1, num_places=num_places, most_pages=99, page_size=16)

    def join(owner: str, at_s: float, num_choices: int = 1, priority: int = 0, ttft_s: float = 1.0) -> Turn:
        asked = Request(
            owner, (1,), SamplingParams(), at_s, num_choices, priority=priority,
            tenant=Tenant(owner, owner, "", weight=1.0), targets=Targets(ttft_s, 0.1),
        )  # fmt: skip
        return turns.join(asked, Mailbox())

    turns = Turns(room, AGEING_S, clock)
    assert join("a", 0.0).has_come, "one is placed whatever is under way"
    wide = join("a", 0.0, num_choices=16, ttft_s=100.0)
    narrow, newer = [join("a", 0.0) for _ in range(3)], join("a", 12.0)
    greedy = join("greedy", 1.0, priority=1)
    served = {"b": Served(10.0, 0.0), "greedy": Served(1e6, 0.0)}
    turns.hear("other", TurnNews("there", 1, 0.0, Next("b", 0, 0.0), served))
    num_places = 5
    turns.look()
    assert [turn.has_come for turn in (*narrow, wide, newer)] == [True] * 3 + [False] * 2, "the fourth does not fit"
    assert not greedy.has_come, "b, which waits elsewhere, has got less"
    clock.advance(FRESH_S)
    turns.look()
    assert greedy.has_come


def test_who_waits_keeps_its_claim_where_a_router_had_nothing_to_tell() -> None:
    """It was idle, and no word of it was lost; then one comes there that has got more."""
    queue = TurnQueue(AGEING_S)
    turns = OtherTurns(queue, "here")
    entries = [Waiting(owner, 1.0, 0, "", math.inf, 0.0, 10) for owner in "xyz"]
    for entry, counter in zip(entries, (100, 1000, 500), strict=True):
        queue.charge(entry, counter)
    turns.hear("other", TurnNews("there", 1, 0.0, None, {}), 0.0)
    for entry in entries[::2]:
        queue.enter(entry)
    greedy = Next("y", 0, 1000.0)
    turns.hear("other", TurnNews("there", 2, 0.0, greedy, {}), 60.0)
    assert [queue.served(owner) for owner in "xz"] == [100.0, 500.0]
    turns.hear("other", TurnNews("there", 4, 0.0, greedy, {}), 60.0)
    assert [queue.served(owner) for owner in "xz"] == [1000.0, 1000.0], "a word was lost"


# -- words


def test_a_word_is_bounded_and_what_is_left_comes_in_the_next() -> None:
    queue = TurnQueue(AGEING_S)
    turns = OtherTurns(queue, "a life")
    for number in range(MOST_TOLD + 10):
        entry = Waiting(f"{number:064}", 1 / 3, 0, "", math.inf, 0.0, 100)
        queue.enter(entry)
        queue.take(entry)
    first, second = (turns.tell() for _ in range(2))
    assert (len(first.served), len(second.served)) == (MOST_TOLD, 10)
    assert not first.served.keys() & second.served.keys()
    assert turns.tell() == TurnNews("a life", 3, queue.last_served, None, {})
    assert len(encoded("router-0", first)) < 14 << 10, "a question has 16 KiB at most"


def test_a_word_arrives_as_it_was_told() -> None:
    first = Next("owner", -3, 17.25)
    for following in (first, None):
        news = TurnNews("a life", 7, 3.5, following, {"owner": Served(17.25, 1 / 3)})
        assert decoded(encoded("router-0", news)) == ("router-0", news)


def test_what_another_router_gave_counts_once() -> None:
    queue = TurnQueue(AGEING_S)
    turns = OtherTurns(queue, "here")
    for so_far in (100.0, 150.0, 150.0):
        turns.hear("other", TurnNews("there", 1, 0.0, None, {"a": Served(100.0, so_far)}), 0.0)
    assert queue.served("a") == 150.0, "100 as it knows of so much, and then 50 more"
    turns.hear("other", TurnNews("its next life", 1, 0.0, None, {"a": Served(0.0, 10.0)}), 0.0)
    turns.hear("other", TurnNews("its next life", 2, 0.0, None, {"a": Served(10.0, 30.0)}), 0.0)
    assert queue.served("a") == 170.0


def test_more_urgent_requests_do_not_wait_for_what_waits_elsewhere() -> None:
    queue = TurnQueue(AGEING_S)
    turns = OtherTurns(queue, "here")
    entry = Waiting("a", 1.0, 0, "", math.inf, 0.0, 100)
    queue.charge(entry, 1000)
    queue.enter(entry)
    for priority, waits in ((0, True), (-1, True), (1, False)):
        turns.hear("other", TurnNews("there", 1, 0.0, Next("b", priority, 0.0), {}), 0.0)
        assert turns.go_first(entry, 0.1) == waits
