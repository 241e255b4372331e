"""The law by which workers change their role: single decisions, and what holds over random loads."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.cluster.supervisor.autoscale import BAND, SPARE_S, Decision, PoolLaw, PoolSize, Range, Settings
from tandem.cluster.supervisor.demand import PoolLoad
from tandem.cluster.supervisor.role_law import PAUSE_S, RoleChange, RoleLaw
from tandem.core.identity import WORKER_ROLES, Role

MARK = 0.7
SHORT = Decision(Role.DECODE, 0.0, 2, 3, "output tokens need 2.00 workers", {"load": 2.0}, lacks=1)
IDLE = Decision(Role.PREFILL, 0.0, 3, 3, "they need 0.50 workers", {"load": 0.5}, spares=2)
RANGES = {Role.PREFILL: Range(1, 4), Role.DECODE: Range(1, 4)}


def decide(
    law: RoleLaw | None = None,
    prefill: Decision = IDLE,
    decode: Decision = SHORT,
    ranges: dict[Role, Range] = RANGES,
    now_s: float = 100.0,
    *,
    may_go: bool = True,
    is_changing: bool = False,
) -> RoleChange | None:
    pools = {Role.PREFILL: prefill, Role.DECODE: decode}
    return (law or RoleLaw()).decide(pools, ranges, lambda *_: may_go, now_s, is_changing=is_changing)


def test_one_goes_from_the_pool_that_has_it_to_spare_to_the_one_that_lacks_it_and_it_is_said_why() -> None:
    change = decide()
    assert change is not None
    assert (change.giver, change.taker, change.instead) == (Role.PREFILL, Role.DECODE, False)
    assert change.why == "output tokens need 2.00 workers; prefill had 2 to spare for 10 s"
    assert change.inputs == {"prefill_load": 0.5, "decode_load": 2.0}


def test_either_way() -> None:
    change = decide(prefill=replace(SHORT, role=Role.PREFILL), decode=replace(IDLE, role=Role.DECODE))
    assert change is not None
    assert (change.giver, change.taker) == (Role.DECODE, Role.PREFILL)


@pytest.mark.parametrize(
    "what",
    [
        {"prefill": replace(IDLE, spares=0)},
        {"decode": replace(SHORT, lacks=0)},
        {"prefill": replace(IDLE, spares=0, lacks=1)},
        {"ranges": {**RANGES, Role.PREFILL: Range(3, 4)}},
        {"ranges": {**RANGES, Role.DECODE: Range(1, 2)}},
        {"may_go": False},
        {"is_changing": True},
    ],
    ids=[
        "none to spare",
        "none is lacking",
        "both lack",
        "its fewest",
        "its most",
        "not flexible",
        "one is on its way",
    ],
)
def test_none_goes(what: dict[str, object]) -> None:
    assert decide() is not None
    assert decide(**what) is None  # type: ignore[arg-type]


def test_in_place_of_one_that_is_far_from_serving_the_pool_does_not_become_larger() -> None:
    change = decide(decode=replace(SHORT, before=4, num_far=1))
    assert change is not None
    assert change.instead


def test_figures_settle_between_two_changes() -> None:
    law = RoleLaw()
    assert decide(law) is not None
    assert decide(law, now_s=102.0, is_changing=True) is None
    assert decide(law, now_s=102.0 + PAUSE_S - 0.1) is None
    assert decide(law, now_s=102.0 + PAUSE_S) is not None


# --- what a pool's own law says for it --------------------------------------------------------------------------------


def look(law: PoolLaw, load: float, num: int, now_s: float, num_unplaced: int = 0) -> Decision:
    size = PoolSize(num, frozenset(map(str, range(num - num_unplaced))), num_unplaced=num_unplaced)
    return law.decide(PoolLoad("prompts", load, load, load), size, now_s)


def test_a_pool_lacks_what_it_would_grow_by_also_where_it_may_not() -> None:
    law = PoolLaw(Role.PREFILL, Range(1, 2), Settings(MARK))
    assert look(law, 2 * MARK * BAND - 0.01, 2, 0.0).lacks == 0
    decision = look(law, 2.5, 2, 2.0)
    assert (decision.wanted, decision.lacks) == (2, 2), "2.5 workers at 70 % are four"


def test_who_waits_for_a_node_is_lacking() -> None:
    law = PoolLaw(Role.PREFILL, Range(1, 4), Settings(MARK))
    decision = look(law, 2.0, 3, 0.0, num_unplaced=2)
    assert (decision.wanted, decision.lacks, decision.num_far) == (3, 2, 2)


def test_who_starts_is_lacking_until_it_is_nearly_there() -> None:
    law, size = PoolLaw(Role.PREFILL, Range(1, 4), Settings(MARK)), PoolSize(3, frozenset("ab"), frozenset("c"))
    load = PoolLoad("prompts", 2.0, 2.0, 2.0)
    found = [law.decide(load, size, now_s) for now_s in (0.0, 10.0, 19.0, 21.0, 29.0)]
    assert [(each.num_far, each.lacks) for each in found] == [(1, 1)] * 3 + [(0, 0)] * 2, "a start takes 30 s"


def test_one_that_changes_its_role_is_near_and_says_nothing_of_how_long_a_start_takes() -> None:
    law, load = PoolLaw(Role.PREFILL, Range(1, 4), Settings(MARK)), PoolLoad("prompts", 2.0, 2.0, 2.0)
    changing = PoolSize(3, frozenset("ab"), frozenset("c"), changing=frozenset("c"))
    found = [law.decide(load, changing, now_s) for now_s in (0.0, 1.0)]
    assert [(each.num_far, each.lacks) for each in found] == [(0, 0)] * 2
    law.decide(load, PoolSize(3, frozenset("abc")), 2.0)
    size = PoolSize(4, frozenset("abc"), frozenset("d"))
    found = [law.decide(load, size, now_s) for now_s in (4.0, 23.0, 25.0)]
    assert [each.num_far for each in found] == [1, 1, 0], "a start takes 30 s, not 2"


def test_a_pool_spares_what_it_has_not_needed_for_a_while() -> None:
    law = PoolLaw(Role.PREFILL, Range(1, 8), Settings(MARK))
    look(law, 2.0, 4, 0.0)
    found = [look(law, 0.5, 4, 2.0 * n).spares for n in range(1, 8)]
    assert found == [0, 0, 0, 0, 1, 3, 3], "of 4, 3 were needed up to 10 s ago"


# --- over random loads ------------------------------------------------------------------------------------------------


@dataclass
class TwoPools:
    """Pools whose loads are told with noise every two seconds, of so many workers in all that no other has room."""

    num: dict[Role, int]
    load: Callable[[Role, float], float]
    change_s: float
    seed: int
    now_s: float = 0.0
    changes: list[tuple[float, RoleChange]] = field(default_factory=list)
    on_its_way: tuple[float, Role] | None = None

    def __post_init__(self) -> None:
        self._random, self._law = random.Random(self.seed), RoleLaw()
        self._laws = {role: PoolLaw(role, RANGES[role], Settings(MARK)) for role in WORKER_ROLES}

    def run(self, until_s: float) -> TwoPools:
        while self.now_s < until_s:
            self._look()
        return self

    def _look(self) -> None:
        self.now_s += 2.0
        if self.on_its_way is not None and self.on_its_way[0] <= self.now_s:
            self.on_its_way = None
        decisions = {role: self._decide(role) for role in WORKER_ROLES}
        change = self._law.decide(
            decisions, RANGES, lambda *_: True, self.now_s, is_changing=self.on_its_way is not None
        )
        if change is not None:
            self.changes.append((self.now_s, change))
            self.num[change.giver] -= 1
            self.num[change.taker] += 1
            self.on_its_way = self.now_s + self.change_s, change.taker
        assert all(RANGES[role].least <= num <= RANGES[role].most for role, num in self.num.items())

    def _decide(self, role: Role) -> Decision:
        """Its size stays: what it wants to grow by has no room, and it does not shrink within the story."""
        load = self.load(role, self.now_s)
        now = load * self._random.uniform(0.9, 1.1)
        told = PoolLoad("prompts", 0.9 * load, load, now)
        coming = self.on_its_way is not None and self.on_its_way[1] is role
        ready = frozenset(f"{role}-{n}" for n in range(self.num[role] - coming))
        return self._laws[role].decide(told, PoolSize(self.num[role], ready), self.now_s)


@pytest.mark.long
@settings(deadline=None, max_examples=30)
@given(
    before=st.tuples(st.floats(0.1, 2.8), st.floats(0.1, 2.8)),
    after=st.tuples(st.floats(0.1, 2.8), st.floats(0.1, 2.8)),
    sizes=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    change_s=st.sampled_from([0.5, 5.0, 60.0]),
    seed=st.integers(0, 1000),
)
def test_workers_go_where_they_are_needed_and_do_not_go_to_and_fro(
    before: tuple[float, float], after: tuple[float, float], sizes: tuple[int, int], change_s: float, seed: int
) -> None:
    step_s, end_s = 600.0, 1200.0

    def load(role: Role, now_s: float) -> float:
        return (before if now_s < step_s else after)[WORKER_ROLES.index(role)]

    world = TwoPools(dict(zip(WORKER_ROLES, sizes, strict=True)), load, change_s, seed).run(end_s)
    assert sum(world.num.values()) == sum(sizes)
    for (at_s, one), (next_s, other) in zip(world.changes, world.changes[1:], strict=False):
        assert next_s - at_s >= change_s
        if one.giver is not other.giver:
            assert next_s - at_s >= SPARE_S
    for begin_s, stop_s in ((0.0, step_s), (step_s, end_s)):
        givers = [change.giver for at_s, change in world.changes if begin_s + SPARE_S < at_s <= stop_s]
        assert len(set(givers)) <= 1, "while loads stay, all go the same way"
        assert len(givers) <= 3
    for role, num in world.num.items():
        (other,) = (each for each in WORKER_ROLES if each is not role)
        needed = math.ceil(1.1 * load(other, end_s) / MARK)
        is_lacking = 0.9 * load(role, end_s) > num * BAND * MARK and num < RANGES[role].most
        assert not is_lacking or world.num[other] <= max(1, needed), "the other one has none to spare"
