"""Quiet steps taken at once are the same as one by one, whatever runs."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.core.layer_groups import kept_pages
from tandem.core.pages import PagePool, page_table
from tandem.core.sampling import SamplingParams
from tandem.core.step_times import Fitted
from tandem.core.token_ids import token_ids
from tandem.core.windows import NO_WINDOWS, Windows
from tandem.sim.quiet import advance, quiet_steps, quiet_times
from tandem.worker.batch import SchedulerLimits
from tandem.worker.scheduler import BatchScheduler
from tandem.worker.sequence import Sequence
from tandem.worker.step_log import terms_of

PAGE, TOKEN = 4, 7
TIMES = Fitted(0.01, 1e-4, 1e-5, 1e-6, 1e-7)
LIMITS = SchedulerLimits(max_num_seqs=8, max_num_batched_tokens=64, chunk_size=16, queue_bound=100)


@dataclass(frozen=True)
class Load:
    """Lengths of prompts and outputs, pages of the pool, how many steps are taken first, to get anywhere, whether
    prompts that begin like earlier ones find their pages, and what layers see. Pages leave where all have a window, and
    on CPUs also where some have; there the pool is for as many places."""

    requests: tuple[tuple[int, int], ...]
    num_pages: int
    num_before: int
    keeps_prefixes: bool = False
    windows: Windows = NO_WINDOWS
    on_cpu: bool = True

    @property
    def limits(self) -> SchedulerLimits:
        if not self.windows.num_full:
            return replace(LIMITS, window=self.windows.window)
        groups = kept_pages(self.windows, self.windows.num_full + 3, PAGE, on_cpu=self.on_cpu).groups
        return replace(LIMITS, window=groups.window, num_windowed=groups.num_windowed)

    @property
    def times(self) -> Fitted:
        return replace(TIMES, windows=self.windows)


loads = st.builds(
    Load,
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 60)), min_size=1, max_size=6).map(tuple),
    st.integers(26, 120),
    st.integers(0, 90),
    st.booleans(),
    st.just(NO_WINDOWS) | st.builds(Windows, st.integers(2, 30), st.just(3), st.integers(0, 2)),
    st.booleans(),
)


def begun(load: Load) -> BatchScheduler:
    pool = PagePool(load.num_pages * (1 + load.limits.num_windowed), PAGE)
    scheduler = BatchScheduler(pool, load.limits, salt=b"", prefix_cache=load.keeps_prefixes)
    scheduler.pool.note_changes()
    for number, (num_prompt, num_output) in enumerate(load.requests):
        prompt, params = token_ids([number % 3] * num_prompt), SamplingParams(max_tokens=num_output)
        scheduler.add(Sequence(str(number), 1, 0, 0.0, number, prompt, num_prompt, params))
    for _ in range(load.num_before):
        step(scheduler, load.times)
    return scheduler


def step(scheduler: BatchScheduler, times: Fitted) -> tuple[float, bool]:
    """Its time, and whether anything happened but a token for each."""
    batch = scheduler.schedule()
    seconds = times.seconds(terms_of(batch, times.windows))
    happened = bool(batch.admitted or batch.preempted or batch.stalled or not batch.items)
    happened |= any(not item.sequence.is_decode for item in batch.items)
    scheduler.apply(batch, [[token_of(item.sequence)] for item in batch.items if item.samples])
    for item in batch.items:
        if item.samples and item.sequence.num_output >= item.sequence.params.max_tokens:
            scheduler.pool.release(scheduler.retire(item.sequence))
            happened = True
    return seconds, happened


def token_of(sequence: Sequence) -> int:
    """Answers differ."""
    return TOKEN + sequence.arrival


def state(scheduler: BatchScheduler) -> object:
    running = [
        (one.request_id, list(one.token_ids), one.num_computed, len(one.pages), len(one.windowed), one.num_hidden)
        for one in scheduler.running
    ]
    waiting = [(one.request_id, list(one.token_ids), one.num_preemptions) for one in scheduler.waiting]
    pages = [page for one in scheduler.running for page in scheduler.held_pages(one)]
    assert scheduler.prefix_cache or len(set(pages)) == len(pages)
    scheduler.pool.check()
    change = scheduler.pool.take_changes()
    held = (set(change.came), set(change.went)) if change is not None else None
    return running, waiting, scheduler.pool.counts(), held


# Texts that grow to their windows where there may be no room for all of these.
tight_loads = st.builds(
    Load,
    st.lists(st.tuples(st.integers(1, 12), st.integers(40, 90)), min_size=3, max_size=6).map(tuple),
    st.integers(26, 44),
    st.integers(3, 30),
    st.booleans(),
    st.builds(Windows, st.integers(8, 40), st.just(3), st.integers(0, 2)),
    st.booleans(),
)


@pytest.mark.long
@given(loads | tight_loads, st.integers(1, 70))
def test_steps_at_once_are_steps_one_by_one(load: Load, most: int) -> None:
    at_once, one_by_one = begun(load), begun(load)
    num = quiet_steps(at_once, most)
    assert 0 <= num <= most
    seconds = [of_one for of_one, _ in zip(quiet_times(at_once, load.times), range(num), strict=False)]
    advance(at_once, num, token_of)
    for expected in seconds:
        took, happened = step(one_by_one, load.times)
        assert abs(took - expected) < 1e-12
        assert not happened
    assert state(at_once) == state(one_by_one)
    # And they go on alike.
    for _ in range(5):
        if at_once.running or at_once.waiting:
            step(at_once, load.times)
            step(one_by_one, load.times)
    assert state(at_once) == state(one_by_one)


@pytest.mark.long
@given(loads | tight_loads)
def test_no_quiet_step_is_missed(load: Load) -> None:
    """Where none is promised, something happens in the next step, or would in the one of a pool that is not as full."""
    scheduler = begun(load)
    if not scheduler.running or scheduler.waiting or quiet_steps(scheduler, 1):
        return
    _, happened = step(scheduler, load.times)
    assert happened


def test_pages_that_came_computed_enter_the_cache_in_planned_steps() -> None:
    """Of many a part in each; so where the next step is quiet, all are there."""
    num_pages = 600
    scheduler = BatchScheduler(PagePool(num_pages + 9, PAGE), LIMITS, salt=b"")
    prompt = list(range(num_pages * PAGE))
    sequence = Sequence("0", 1, 0, 0.0, 0, [*prompt, TOKEN], len(prompt), SamplingParams(max_tokens=20))
    sequence.pages, sequence.num_computed = page_table(scheduler.pool.allocate(num_pages) or ()), len(prompt)
    scheduler.enter(sequence)
    published = []
    while not quiet_steps(scheduler, 9):
        step(scheduler, TIMES)
        published.append(sequence.num_published)
    assert published == [512, num_pages]


@pytest.mark.parametrize("keeps_prefixes", [False, True])
def test_in_a_window_any_number_of_steps_is_quiet_in_a_pool_that_holds_the_window_alone(keeps_prefixes: bool) -> None:
    """What is given back is taken again: 1,000 steps of a text of 1,100 tokens, in 25 pages of 4."""
    load = Load(((80, 1100),), 25, 6, keeps_prefixes, Windows(40, 3))
    at_once, one_by_one = begun(load), begun(load)
    assert quiet_steps(at_once, 1000) == 1000
    advance(at_once, 1000, token_of)
    for _ in range(1000):
        step(one_by_one, load.times)
    assert state(at_once) == state(one_by_one)
    (sequence,) = at_once.running
    assert sequence.num_hidden == (sequence.num_computed - 40 + 1) // PAGE > 250
    assert len(at_once.held_pages(sequence)) <= 11


def test_of_a_mixed_model_a_page_a_place_is_taken_and_the_others_swapped() -> None:
    """1,000 steps of a text of 1,100 tokens: 250 pages for the layer that sees all, beside those of the window."""
    load = Load(((80, 1100),), 80, 6, True, Windows(40, 3, 1))
    at_once, one_by_one = begun(load), begun(load)
    assert quiet_steps(at_once, 1000) == 1000
    advance(at_once, 1000, token_of)
    for _ in range(1000):
        step(one_by_one, load.times)
    assert state(at_once) == state(one_by_one)
    (sequence,) = at_once.running
    assert sequence.num_hidden == (sequence.num_computed - 40 + 1) // PAGE > 250
    assert len(at_once.held_pages(sequence)) <= len(sequence.pages) + 3 * 11 < at_once.pool.num_pages


@pytest.mark.parametrize("is_windowed", [False, True])
def test_a_page_of_either_kind_that_another_choice_reads_is_copied_in_a_planned_step(is_windowed: bool) -> None:
    scheduler = BatchScheduler(PagePool(20, PAGE), replace(LIMITS, window=8, num_windowed=2), salt=b"")
    sequence = Sequence("0", 1, 0, 0.0, 0, token_ids([TOKEN] * 6), 5, SamplingParams(max_tokens=9), num_computed=5)
    sequence.pages, sequence.windowed = (page_table(scheduler.pool.allocate(num) or ()) for num in (2, 4))
    scheduler.enter(sequence)
    assert quiet_steps(scheduler, 2) == 2
    shared = [(sequence.windowed if is_windowed else sequence.pages)[-1]]
    scheduler.pool.share(shared)
    assert quiet_steps(scheduler, 2) == 0
    assert [source for source, _ in scheduler.schedule().copies] == shared


def test_pages_of_a_mixed_model_that_came_computed_enter_the_cache_in_planned_steps() -> None:
    """A part in each: those of the layer that sees all which no layer with a window does."""
    num_pages = 700
    scheduler = BatchScheduler(PagePool(1000, PAGE), replace(LIMITS, window=40, num_windowed=1), salt=b"")
    prompt = list(range(num_pages * PAGE))
    sequence = Sequence("0", 1, 0, 0.0, 0, [*prompt, TOKEN], len(prompt), SamplingParams(max_tokens=20))
    sequence.num_hidden = scheduler.num_hidden(len(prompt))
    taken = scheduler.pool.allocate(2 * num_pages - sequence.num_hidden) or []
    sequence.pages, sequence.windowed = scheduler.groups.tables(taken, sequence.num_hidden, num_pages)
    sequence.num_computed = len(prompt)
    scheduler.enter(sequence)
    published = []
    while not quiet_steps(scheduler, 9):
        step(scheduler, TIMES)
        published.append(sequence.num_published)
    assert published == [512, sequence.num_hidden]


def test_a_page_of_two_texts_comes_back_once() -> None:
    """Their next pages are wanted in the fourth step, and of the first one's place only one can be made."""
    scheduler = BatchScheduler(PagePool(5, PAGE), replace(LIMITS, window=11), salt=b"", prefix_cache=False)
    shared = scheduler.pool.allocate(3) or []
    scheduler.pool.share(shared)
    for number in range(2):
        params = SamplingParams(max_tokens=50)
        sequence = Sequence(str(number), 1, 0, 0.0, number, token_ids([TOKEN] * 14), 13, params, num_computed=13)
        sequence.pages = page_table([*shared, *(scheduler.pool.allocate(1) or [])])
        scheduler.enter(sequence)
    assert quiet_steps(scheduler, 40) == 3
    advance(scheduler, 3, token_of)
    assert scheduler.schedule().preempted
