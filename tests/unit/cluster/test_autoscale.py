"""The law by which pools follow their load: single decisions, and what holds over random loads in a simple world."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from load_world import TOKENS_PER_S, PrefillWorld

from tandem.cluster.supervisor.autoscale import BAND, Decision, Most, PoolLaw, PoolSize, Range, Settings
from tandem.cluster.supervisor.demand import PoolLoad
from tandem.core.identity import Role

MARK, DELAY_S = 0.7, 120.0
WIDE = Range(1, 16)


class Told:
    """One pool whose load and size are told, every two seconds; what it decides is not carried out by itself."""

    def __init__(self, num: int, bounds: Range = WIDE) -> None:
        self.law = PoolLaw(Role.PREFILL, bounds, Settings(MARK, DELAY_S))
        self.now_s, self.wanted = 1000.0, num
        self.ready = frozenset(f"life-{number}" for number in range(num))
        self.starting = frozenset[str]()
        self.num_leaving = 0

    def look(self, load: float | PoolLoad | None, after_s: float = 2.0) -> Decision:
        self.now_s += after_s
        told = PoolLoad("prompts", load, load, load) if isinstance(load, float) else load
        size = PoolSize(self.wanted, self.ready, self.starting, self.num_leaving)
        return self.law.decide(told, size, self.now_s)

    def stay(self, load: float | PoolLoad | None, seconds: float) -> None:
        for _ in range(round(seconds / 2)):
            assert not (decision := self.look(load)).is_change, decision.why

    def order(self, decision: Decision) -> None:
        """What was decided begins to start."""
        self.starting |= {f"new-{self.now_s}-{number}" for number in range(decision.wanted - decision.before)}
        self.wanted = decision.wanted

    def start(self) -> None:
        """All that start are ready."""
        self.ready, self.starting = self.ready | self.starting, frozenset()


def test_without_figures_it_stays_as_it_is() -> None:
    pool = Told(3)
    pool.stay(None, 600)
    assert "no figures" in pool.look(None).why


def test_it_grows_at_once_to_what_is_needed_and_says_why() -> None:
    pool = Told(2)
    decision = pool.look(4.2)
    assert decision.wanted == 6, "4.2 workers at 70 %"
    assert "need 4.20 workers" in decision.why
    assert decision.inputs["certain_load"] == 4.2


def test_inside_the_band_it_stays() -> None:
    pool = Told(4)
    pool.stay(4 * MARK * BAND - 0.01, 600)
    pool.stay(3 * MARK + 0.01, 600)
    assert pool.look(4 * MARK * BAND + 0.01).wanted == 5


def test_those_that_start_count_as_coming() -> None:
    pool = Told(2)
    pool.order(pool.look(4.2))
    pool.stay(4.2, 60)
    pool.start()
    pool.stay(4.2, 60)


def test_it_shrinks_by_one_when_the_load_was_low_for_the_whole_delay() -> None:
    pool = Told(4)
    pool.stay(1.0, DELAY_S)
    decision = pool.look(1.0)
    assert decision.before - decision.wanted == 1
    assert f"for {DELAY_S:.0f} s" in decision.why


@pytest.mark.parametrize(("num", "load", "wanted"), [(19, 1.0, 18), (20, 1.0, 18), (192, 1.0, 173), (192, 126.1, 181)])
def test_a_large_pool_gives_up_a_tenth_at_a_time_and_no_more_than_it_can_spare(
    num: int, load: float, wanted: int
) -> None:
    pool = Told(num, Range(1, 200))
    pool.stay(load, DELAY_S)
    assert pool.look(load).wanted == wanted


def test_a_large_pool_keeps_its_fewest() -> None:
    pool = Told(100, Range(95, 200))
    pool.stay(1.0, DELAY_S)
    assert pool.look(1.0).wanted == 95


def test_a_peak_puts_shrinking_off_for_the_whole_delay() -> None:
    pool = Told(4)
    pool.stay(1.0, 100)
    pool.stay(2.7, 2)
    pool.stay(1.0, DELAY_S)
    assert pool.look(1.0).wanted == 3


def test_it_gives_up_the_next_one_when_the_last_is_gone_and_a_quarter_of_a_start_later() -> None:
    pool = Told(4)
    pool.num_leaving = 1
    pool.stay(1.0, 300)
    pool.num_leaving = 0
    assert pool.look(1.0).wanted == 3
    pool.wanted = 3
    pool.stay(1.0, 6)
    assert pool.look(1.0).wanted == 2


def test_what_it_decided_and_nobody_did_is_not_remembered_as_done() -> None:
    """As where a worker changed its role in that look."""
    pool = Told(4)
    pool.stay(1.0, DELAY_S)
    assert pool.look(1.0).wanted == 3
    assert pool.look(1.0).wanted == 3, "it is said again two seconds later"


def test_what_others_took_or_gave_is_remembered_as_done() -> None:
    pool = Told(4)
    pool.stay(1.0, DELAY_S)
    pool.wanted, pool.ready = 3, frozenset(sorted(pool.ready)[:3])
    pool.stay(1.0, 6)
    assert pool.look(1.0).wanted == 2, "a quarter of a start after the last one went"
    pool.wanted, pool.ready = 4, pool.ready | {"come"}
    pool.stay(1.0, DELAY_S - 2)
    assert pool.look(1.0).wanted == 3, "it has grown, which begins the while anew"


def test_those_that_never_come_do_not_keep_it_from_shrinking() -> None:
    pool = Told(2)
    pool.order(pool.look(4.2))
    assert pool.wanted == 6
    pool.stay(1.0, DELAY_S)
    assert pool.look(1.0).wanted == 5


def test_what_has_no_node_is_said() -> None:
    pool = Told(2)
    decision = pool.law.decide(None, PoolSize(3, pool.ready, frozenset({"new"}), num_unplaced=1), 1000.0)
    assert decision.why == "there are no figures now; 1 of 3 have no node yet"


def test_it_does_not_shrink_soon_after_it_has_grown() -> None:
    pool = Told(2)
    pool.order(pool.look(4.2))
    pool.start()
    pool.stay(0.1, DELAY_S)
    assert pool.look(0.1).wanted == 5


@pytest.mark.parametrize("load", [0.0, 100.0])
def test_it_keeps_to_its_bounds_and_says_so(load: float) -> None:
    pool = Told(3, Range(3, 5))
    decisions = [pool.look(load) for _ in range(200)]
    assert {decision.wanted for decision in decisions} == {3 if load < 1 else 5}
    pool.wanted = decisions[-1].wanted
    assert ("its fewest" if load < 1 else "its most") in pool.look(load).why


def test_new_bounds_are_kept_at_once() -> None:
    pool = Told(3)
    pool.law.range = Range(5, 8)
    assert pool.look(None).wanted == 5
    pool.law.range = Range(1, 2)
    assert pool.look(None).wanted == 2


def test_what_waits_counts_as_far_as_it_would_still_wait_when_a_worker_has_started() -> None:
    pool = Told(2)
    assert pool.look(PoolLoad("prompts", 1.0, 1.0, 1.0, backlog_s=20.0)).wanted == 2, "done in 20 s; a start takes 30"
    decision = pool.look(PoolLoad("prompts", 1.0, 1.0, 1.0, backlog_s=150.0))
    assert decision.wanted == 3
    assert "150.0 s of one worker's work wait" in decision.why


def late(load: float, num: int, num_late: int) -> PoolLoad:
    return PoolLoad("prompts", load, load, load, num_timed=num, num_late=num_late)


def test_missed_targets_lower_the_mark_and_want_one_worker_more() -> None:
    pool = Told(2)
    pool.stay(late(1.2, 10, 0), 60)
    decision = pool.look(late(1.2, 100, 90))
    assert decision.wanted == 3
    assert "missed their target" in decision.why
    assert decision.inputs["mark"] < 1.2 / 2
    pool.order(decision)
    pool.start()
    pool.stay(late(1.2, 10, 0), 600)


def test_what_missed_its_target_while_the_pool_was_too_small_says_nothing_of_the_new_one() -> None:
    pool = Told(2)
    pool.order(pool.look(late(4.2, 100, 100)))
    for _ in range(30):
        assert not pool.look(late(4.2, 100, 100)).is_change
    pool.start()
    pool.stay(late(4.2, 100, 100), 14)
    pool.stay(late(4.2, 100, 0), 300)


def test_a_few_late_ones_may_be_chance() -> None:
    pool = Told(2)
    pool.stay(late(1.2, 1, 0), 40)
    pool.stay(late(1.2, 1, 1), 6)


def test_a_pool_that_idles_misses_its_targets_for_another_reason() -> None:
    pool = Told(4, Range(4, 16))
    pool.stay(late(0.4, 100, 100), 600)


def test_a_lowered_mark_recovers() -> None:
    pool = Told(2, Range(2, 3))
    pool.stay(late(1.2, 10, 0), 60)
    pool.order(pool.look(late(1.2, 100, 90)))
    pool.start()
    pool.law.range = Range(3, 4)
    marks = [pool.look(late(1.2, 10, 0)).inputs["mark"] for _ in range(3000)]
    assert marks[0] < 0.6
    assert marks[-1] > 0.95 * MARK
    assert marks[100:] == sorted(marks[100:])


def test_the_largest_of_the_last_seconds() -> None:
    most = Most(10.0)
    for at_s, value, expected in ((0, 3.0, 3), (4, 1.0, 3), (8, 2.0, 3), (11, 0.5, 2), (19, 0.1, 0.5), (30, 0.0, 0)):
        most.note(at_s, value)
        assert most.most == expected


# --- over random loads ------------------------------------------------------------------------------------------------

OF_ONE = TOKENS_PER_S / 500
"""Requests of the world that one worker serves in a second."""


@st.composite
def loads(draw: st.DrawFn) -> tuple[str, Callable[[float], float]]:
    """Requests a second over time, of up to 12 workers, and its kind."""
    low, high = draw(st.floats(0.2, 3)) * OF_ONE, draw(st.floats(3, 12)) * OF_ONE
    at_s = draw(st.floats(300, 900))
    kind = draw(st.sampled_from(["constant", "step up", "step down", "ramp", "bursts", "waves"]))
    if kind == "constant":
        return kind, lambda _: high
    if kind == "step up":
        return kind, lambda now_s: low if now_s < at_s else high
    if kind == "step down":
        return kind, lambda now_s: high if now_s < at_s else low
    if kind == "ramp":
        return kind, lambda now_s: low + (high - low) * min(1.0, now_s / (2 * at_s))
    if kind == "bursts":
        return kind, lambda now_s: high if now_s % at_s < 20 else low
    return kind, lambda now_s: (low + high) / 2 + (high - low) / 2 * math.sin(2 * math.pi * now_s / (2 * at_s))


@pytest.mark.long
@settings(deadline=None, max_examples=8, derandomize=True)  # what noise does is a matter of chance
@given(load=loads(), start_s=st.sampled_from([5.0, 30.0, 120.0]), seed=st.integers(0, 1000))
def test_over_random_loads_it_does_not_flap_and_keeps_to_its_bounds(
    load: tuple[str, Callable[[float], float]], start_s: float, seed: int
) -> None:
    kind, rate = load
    world = PrefillWorld(rate, start_s, Range(1, 24), seed=seed).run(3600)
    shrunk = [at for (at, after), (_, before) in zip(world.sizes[1:], world.sizes, strict=False) if after < before]
    grown = [at for (at, after), (_, before) in zip(world.sizes[1:], world.sizes, strict=False) if after > before]
    assert all(not 0 <= at - before < DELAY_S for at in shrunk for before in grown), "never soon after it has grown"
    if kind == "constant":  # noise alone: the first growth aside
        assert len([at for at in world.turns if at > 600]) <= 12, world.sizes  # 50 might be: two in each delay
    else:  # at most one turn up and one down for each time that the load goes up and down, and noise
        assert len(world.turns) <= 3600 / DELAY_S, world.sizes
    if kind != "bursts":  # one may have begun in the last second
        assert world.wanted * OF_ONE > rate(world.now_s), "what comes can be served in the end"


@pytest.mark.long
@pytest.mark.parametrize("start_s", [5.0, 60.0, 180.0])
def test_after_a_step_requests_are_in_time_again_soon_after_workers_have_started(start_s: float) -> None:
    step_s = 900.0
    for seed in range(3):

        def rate(now_s: float) -> float:
            return OF_ONE if now_s < step_s else 10 * OF_ONE

        world = PrefillWorld(rate, start_s, Range(1, 32), seed=seed).run(step_s + 2 * start_s + 300)
        assert world.size_at(step_s + 10) * OF_ONE * 0.9 > 10 * OF_ONE, "wanted within seconds"
        before, after = world.late_share(300, step_s), world.late_share(step_s + 2 * start_s + 120, world.now_s)
        assert after < before + 0.05
