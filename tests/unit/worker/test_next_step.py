"""Steps that are planned while the one before them is computed: what they compute, and when what they gave is told."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import cast

import pytest

from tandem.core.identity import Role
from tandem.core.pages import PagePool, page_table
from tandem.core.sampling import SamplingParams
from tandem.core.token_ids import token_ids
from tandem.worker.batch import Batch, SchedulerLimits
from tandem.worker.next_step import NextStep
from tandem.worker.scheduler import BatchScheduler
from tandem.worker.sequence import Sequence
from tandem.worker.step import StepHooks
from tests.support.handoff_world import DECODE, PREFILL, World, WorldSpec
from tests.support.link import LinkSpec
from tests.unit.worker.test_virtual_cluster import check_tokens, serve, tokens


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How many steps were planned ahead, computed so, and told late."""
    count: Counter[str] = Counter()
    plan, next_one, after = BatchScheduler.schedule_behind, NextStep.next, NextStep.computed

    def schedule_behind(self: BatchScheduler, batch: Batch) -> Batch | None:
        behind = plan(self, batch)
        count["planned"] += behind is not None
        return behind

    def take(self: NextStep) -> Batch:
        foreseen = self._planned
        found = next_one(self)
        count["taken"] += foreseen is not None and found is foreseen
        return found

    def computed(self: NextStep, batch: Batch, sampled: Seq[Seq[int]]) -> None:
        after(self, batch, sampled)
        count["told later"] += self._untold is not None

    monkeypatch.setattr(BatchScheduler, "schedule_behind", schedule_behind)
    monkeypatch.setattr(NextStep, "next", take)
    monkeypatch.setattr(NextStep, "computed", computed)
    return count


def num_steps(world: World) -> int:
    return sum(node.runner.num_steps for node in world.of_role(Role.DECODE))


@pytest.mark.long
def test_steps_that_are_planned_ahead_are_those_that_would_have_been(planned: Counter[str]) -> None:
    """Where there is room for all, nothing is computed in vain or later: as many steps, to the same moment."""
    room = replace(DECODE, num_pages=1024, limits=replace(DECODE.limits, max_num_seqs=200))
    calm, ahead = (
        serve(WorldSpec(seed=1, num_decode=1, decode=replace(room, ahead=is_ahead))) for is_ahead in (False, True)
    )
    assert tokens(ahead) == tokens(calm)
    assert num_steps(ahead) == num_steps(calm)
    assert ahead.kernel.now_s == calm.kernel.now_s
    assert planned["taken"] > num_steps(ahead) * 0.8
    assert planned["told later"] > num_steps(ahead) * 0.8


@pytest.mark.long
@pytest.mark.parametrize(("window", "num_windowed"), [(0, 0), (9, 2)], ids=["all", "mixed"])
def test_faults_cancels_crashes_and_short_pages_change_no_token_and_leave_nothing(
    window: int, num_windowed: int, planned: Counter[str]
) -> None:
    limits = replace(DECODE.limits, chunk_size=8, window=window, num_windowed=num_windowed)
    decode = replace(DECODE, num_pages=32 * (1 + num_windowed), limits=limits, ahead=True)
    prefill = replace(PREFILL, num_pages=48 * (1 + num_windowed), limits=replace(limits, unpromoted_share=0.75))
    link = LinkSpec(fault_share=0.03)
    spec = WorldSpec(seed=1, link=link, mixed_pool_tokens=12, prefill=prefill, decode=decode)
    world = serve(spec, num_cancels=8, crashes={"prefill-0": 0.2, "decode-1": 0.5})
    check_tokens(world)
    assert any(node.counters.num_preemptions for node in world.of_role(Role.DECODE))
    assert planned["taken"] > num_steps(world) / 4


class Hooks:
    """A role that samples what it is told, and notes what is asked of it."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.may_wait = True
        self.ended: list[Sequence] = []

    def before_schedule(self) -> None: ...

    def may_plan_behind(self, _batch: Batch) -> bool:
        return True

    def may_tell_later(self, _batch: Batch) -> bool:
        return self.may_wait

    def goes_on(self, sequence: Sequence) -> bool:
        return bool(sequence.pages) and sequence not in self.ended

    def after_step(self, batch: Batch) -> None:
        self.told.append("".join(item.sequence.request_id for item in batch.items))

    def step_failed(self, _batch: Batch, error: Exception) -> None:
        self.told.append(str(error))


class Generating:
    """Some sequences, each behind a prompt of a page."""

    def __init__(self, names: str, num_pages: int = 16) -> None:
        self.scheduler = BatchScheduler(PagePool(num_pages, 4), SchedulerLimits(8, 64, 16, 8), salt=b"")
        self.hooks = Hooks()
        self.steps = NextStep(self.scheduler, cast(StepHooks, self.hooks), ahead=self.hooks)
        self.sequences = {name: self.enter(name) for name in names}

    def enter(self, name: str) -> Sequence:
        pages = self.scheduler.pool.allocate(1)
        assert pages is not None
        sequence = Sequence(name, 1, 0, 0.0, ord(name), token_ids([1, 2, 3, 4, 5]), 4, SamplingParams())
        sequence.pages, sequence.num_computed = page_table(pages), 4
        self.scheduler.enter(sequence)
        return sequence

    def step(self) -> str:
        """One whole step; returns whose it was, and each's place."""
        batch = self.steps.next()
        self.steps.while_computed(batch)
        self.steps.computed(batch, [[7]] * len(batch.items))
        return " ".join(f"{item.sequence.request_id}{item.start}" for item in batch.items)


def test_who_comes_while_a_step_is_computed_takes_part_in_the_next_one_and_who_has_left_does_not() -> None:
    world = Generating("abc")
    assert world.step() == "a4 b4 c4"
    world.sequences["d"] = world.enter("d")
    world.hooks.ended.append(world.sequences["a"])
    world.scheduler.pool.release(world.scheduler.remove(world.sequences["c"]))
    assert world.step() == "b5 d4"
    assert world.sequences["b"].token_ids.tolist() == [1, 2, 3, 4, 5, 7, 7], "nothing of what was planned is left"
    assert world.step() == "b6 d5"


def test_for_who_has_more_to_compute_than_a_token_the_next_step_is_decided_anew() -> None:
    """A prompt that comes to decode, or an output that is replayed."""
    world = Generating("ab")
    world.step()
    prompt = world.enter("c")
    prompt.token_ids.extend([6, 7, 8])
    assert world.step() == "a5 b5 c4"


def test_what_a_step_gave_is_told_when_the_next_one_is_launched() -> None:
    world = Generating("ab")
    world.step()
    assert world.hooks.told == []
    batch = world.steps.next()
    assert world.hooks.told == []
    world.steps.while_computed(batch)
    assert world.hooks.told == ["ab"]
    world.hooks.may_wait = False
    world.steps.computed(batch, [[7], [7]])
    assert world.hooks.told == ["ab", "ab"]


def test_where_nobody_goes_on_what_a_step_gave_is_told_at_once() -> None:
    world = Generating("a")
    world.step()
    world.hooks.ended.append(world.sequences["a"])
    world.scheduler.waiting.append(world.sequences["a"])  # and where somebody waits: the plan is dropped
    world.steps.next()
    assert world.hooks.told == ["a"]


def test_a_step_that_fails_is_told_behind_the_one_before_it() -> None:
    world = Generating("ab")
    world.step()
    batch = world.steps.next()
    world.steps.failed(batch, RuntimeError("no device"))
    assert world.hooks.told == ["ab", "no device"]
    assert world.step() == "a5 b5", "its plan is gone with it"


def test_nothing_is_planned_that_would_take_pages_from_somebody() -> None:
    world = Generating("ab", num_pages=3)
    batch = world.steps.next()  # takes a page for one of them, and none is left for the other
    assert world.scheduler.schedule_behind(batch) is None
    assert [len(sequence.token_ids) for sequence in world.sequences.values()] == [5, 5]


def test_nothing_is_planned_that_would_copy_a_page() -> None:
    world = Generating("a")
    (batch,) = [world.steps.next()]
    world.scheduler.pool.share(world.sequences["a"].pages[1:])
    assert world.scheduler.schedule_behind(batch) is None
    world.scheduler.pool.release(world.sequences["a"].pages[1:])
    assert world.scheduler.schedule_behind(batch) is not None
