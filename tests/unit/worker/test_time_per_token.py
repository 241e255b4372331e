"""Chunks of prompts leave those that generate the time per token that they want, once a worker knows its steps."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.core.pages import PagePool
from tandem.core.sampling import SamplingParams
from tandem.core.step_times import NO_PROMPTS, PromptSteps
from tandem.core.token_ids import token_ids
from tandem.worker.batch import Batch, SchedulerLimits
from tandem.worker.scheduler import BatchScheduler
from tandem.worker.sequence import Sequence

PAGE, CHUNK = 16, 512
LIMITS = SchedulerLimits(max_num_seqs=64, max_num_batched_tokens=2048, chunk_size=CHUNK, queue_bound=1000)


@dataclass
class Worker:
    """Steps take `of_step_s`, and `of_row_s` and `of_token_s` for what is in them."""

    of_step_s: float = 0.01
    of_row_s: float = 0.0002
    of_token_s: float = 0.0004
    scheduler: BatchScheduler = field(
        default_factory=lambda: BatchScheduler(PagePool(5000, PAGE), LIMITS, salt=b"", prefix_cache=False)
    )
    numbers: Iterator[int] = field(default_factory=lambda: iter(range(1_000_000)))

    def add(
        self, num_prompt: int, num_output: int, tpot_s: float, *, yields: bool = True, paced: bool = False
    ) -> Sequence:
        number = next(self.numbers)
        sequence = Sequence(
            str(number), 1, 0, 0.0, number, token_ids([1] * num_prompt), num_prompt,
            SamplingParams(max_tokens=num_output), yields=yields, paced=paced, tpot_s=tpot_s,
        )  # fmt: skip
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> tuple[Batch, float, int]:
        """The step, its time, and how many sequences it generated for."""
        batch = self.scheduler.schedule()
        rows = sum(item.sequence.is_decode for item in batch.items)
        num_tokens = batch.num_chunk_tokens + batch.num_paced_tokens
        seconds = self.of_step_s + self.of_row_s * rows + self.of_token_s * num_tokens
        self.scheduler.note_step(rows, num_tokens, seconds)
        self.scheduler.apply(batch, [[7] for item in batch.items if item.samples])
        for item in batch.items:
            if item.samples and item.sequence.num_output >= item.sequence.params.max_tokens:
                self.scheduler.pool.release(self.scheduler.remove(item.sequence))
        return batch, seconds, rows

    def learn(self) -> None:
        """Prompts of all lengths, with nobody beside them who would mind."""
        for num_prompt in 4 * (700, 100, 1300, 60, 900, 333, 512, 40):
            self.add(num_prompt, 12, math.inf)
        while self.scheduler.running or self.scheduler.waiting:
            self.step()


@pytest.mark.long
@given(st.floats(0.03, 0.3), st.integers(1, 40), st.integers(64, 4000), st.floats(1e-4, 2e-3), st.floats(0.002, 0.02))
def test_steps_keep_the_time_and_prompts_go_on(
    tpot_s: float, num_rows: int, num_prompt: int, of_token_s: float, of_step_s: float
) -> None:
    worker = Worker(of_step_s=of_step_s, of_token_s=of_token_s)
    worker.learn()
    for _ in range(num_rows):
        worker.add(PAGE, 5000, tpot_s)
    while worker.scheduler.waiting or any(not one.is_decode for one in worker.scheduler.running):
        worker.step()
    prompt = worker.add(num_prompt, 2, tpot_s)
    num_steps = 0
    least = max(PAGE, CHUNK // 8)
    room = (0.9 * tpot_s - of_step_s - worker.of_row_s * num_rows) / of_token_s
    while not prompt.num_output:
        _, seconds, rows = worker.step()
        num_steps += 1
        assert rows == num_rows, "nobody who generates is left out of a step"
        floor_s = worker.of_step_s + worker.of_row_s * rows + worker.of_token_s * least
        assert seconds <= max(1.1 * tpot_s, 1.02 * floor_s)
    # No chunk is smaller than it has to be: but for pages' borders, and what is kept back.
    each = min(CHUNK, max(least, 0.8 * room)) - PAGE
    assert num_steps <= math.ceil(num_prompt / max(PAGE, each)) + 1


def test_the_most_urgent_of_them_counts() -> None:
    worker = Worker()
    worker.learn()
    worker.add(PAGE, 5000, 0.5)
    worker.add(PAGE, 5000, 0.05)
    worker.step()
    worker.add(4000, 2, 0.5)
    batch, seconds, _ = worker.step()
    assert batch.num_chunk_tokens < CHUNK
    assert seconds <= 0.055


def test_alone_a_prompt_is_computed_in_chunks_of_full_size() -> None:
    worker = Worker()
    worker.learn()
    worker.add(2000, 2, 0.001)
    sizes = [worker.step()[0].num_chunk_tokens for _ in range(4)]
    assert sizes == [CHUNK, CHUNK, CHUNK, 2000 - 3 * CHUNK]


@pytest.mark.parametrize(("tpot_s", "yields"), [(math.inf, True), (0.02, False)])
def test_where_nobody_asks_or_who_has_waited_enough_there_is_no_bound(tpot_s: float, yields: bool) -> None:
    worker = Worker()
    worker.learn()
    worker.add(PAGE, 5000, tpot_s)
    worker.step()
    worker.add(2000, 2, tpot_s, yields=yields)
    assert worker.step()[0].num_chunk_tokens == CHUNK


# ---- prompts beside tokens in clusters whose prefill workers compute most of them


@pytest.mark.long
@given(st.floats(0.02, 0.3), st.integers(0, 40), st.integers(100, 4000), st.floats(1e-5, 2e-3), st.floats(0.002, 0.02))
def test_a_paced_prompt_is_not_felt_from_its_first_step_on(
    tpot_s: float, num_rows: int, num_prompt: int, of_token_s: float, of_step_s: float
) -> None:
    """Also while the worker knows nothing of its steps; prompts go on wherever the time can be kept at all."""
    worker = Worker(of_step_s=of_step_s, of_token_s=of_token_s)
    worker.scheduler.limits = replace(LIMITS, computes_prompts=True)
    for _ in range(num_rows):
        worker.add(PAGE, 5000, tpot_s).yields = False
    while worker.scheduler.waiting or any(not one.is_decode for one in worker.scheduler.running):
        worker.step()
    prompts = [worker.add(num_prompt, 2, tpot_s, paced=True) for _ in range(3)]
    took_s, plain_s = 0.0, of_step_s + worker.of_row_s * (num_rows + 2)
    floor_s = plain_s + of_token_s * PAGE
    while not all(prompt.num_output for prompt in prompts):
        batch, seconds, rows = worker.step()
        took_s += seconds
        assert rows >= num_rows, "nobody who generates is left out of a step"
        assert seconds <= max(1.15 * tpot_s, 1.1 * floor_s)
        assert batch.num_paced_tokens
    each = min(CHUNK, max(PAGE, 0.7 * (0.9 * tpot_s - plain_s) / of_token_s))
    # Fewer tokens a step delay the prompts by up to a fifth of what they spare those who generate.
    of_token_of_prompt_s = of_token_s + plain_s / each + 0.2 * num_rows * of_token_s
    assert took_s <= 1.3 * 3 * num_prompt * of_token_of_prompt_s + 40 * floor_s


def test_what_prompts_take_is_told_as_targets_leave_it() -> None:
    worker = Worker()
    assert worker.scheduler.prompt_steps() == NO_PROMPTS, "nobody wants prompts beside tokens"
    worker.scheduler.limits = replace(LIMITS, computes_prompts=True)
    assert worker.scheduler.prompt_steps() == PromptSteps(CHUNK), "nothing is known"
    worker.add(PAGE, 5000, 1.0).yields = False
    for _ in range(20):
        worker.step()
    for _ in range(8):
        worker.add(4000, 2, 1.0, paced=True)
    while any(not one.is_decode for one in worker.scheduler.running) or worker.scheduler.waiting:
        worker.step()
    for _ in range(20):
        worker.step()
    for tpot_s, num_tokens in ((math.inf, CHUNK), (0.1, 198), (0.05, 86), (0.01, 0)):
        worker.scheduler.running[0].tpot_s = tpot_s
        told = worker.scheduler.prompt_steps()
        assert 0.25 * num_tokens <= told.num_tokens <= num_tokens + 2
        assert told.step_s == pytest.approx(worker.of_step_s + worker.of_row_s, rel=0.05)
        assert told.token_s == pytest.approx(worker.of_token_s if num_tokens else 0, rel=0.1)
    worker.scheduler.running[0].tpot_s = 1.0
    worker.scheduler.limits = replace(LIMITS, computes_prompts=True, paced_tokens=40)
    assert worker.scheduler.prompt_steps().num_tokens <= 39, "an operator's bound holds whatever the time"


def test_steps_are_learnt_for_those_alone_who_ask() -> None:
    """Of a split cluster's decode worker nobody asks how many tokens unpaced prompts may have."""
    worker = Worker()
    assert not worker.scheduler.learns_steps
    worker.scheduler.limits = replace(LIMITS, computes_prompts=True)
    for num_prompt in 4 * (700, 100, 1300, 60):
        worker.add(num_prompt, 12, math.inf, paced=True)
    while worker.scheduler.running or worker.scheduler.waiting:
        worker.step()
    assert worker.scheduler.learns_steps
    assert worker.scheduler.budget.most_tokens(1, 1.0) is None
    worker.learn()
    assert worker.scheduler.budget.most_tokens(1, 1.0) is not None
