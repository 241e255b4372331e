"""Whatever happens to a batch's sequences, kept block tables hold what tables made anew for the step would."""

from __future__ import annotations

import random

import pytest
import torch

from tandem.core.errors import OverloadedError
from tandem.core.pages import PagePool, num_hidden_pages, page_table, pages_for
from tandem.core.sampling import SamplingParams
from tandem.core.token_ids import token_ids
from tandem.engine.batch import SequenceInput
from tandem.engine.block_tables import BlockTables
from tandem.worker.batch import Batch, SchedulerLimits
from tandem.worker.runner import inputs_of
from tandem.worker.scheduler import BatchScheduler
from tandem.worker.sequence import Sequence

PAGE, MAX_SEQS, MAX_TOKENS = 4, 6, 72
LONGEST = pages_for(MAX_TOKENS, PAGE)


class _Life:
    """Sequences come, grow, fork, lose their pages and end; before each step the tables are compared."""

    def __init__(self, seed: int, num_pages: int, window: int, num_windowed: int) -> None:
        self.random = random.Random(seed)
        pool = PagePool(num_pages, PAGE)
        limits = SchedulerLimits(MAX_SEQS, 24, 12, 4, window=window, num_windowed=num_windowed)
        self.scheduler = BatchScheduler(pool, limits, salt=b"m")
        self.kept = [
            BlockTables(
                LONGEST,
                pool.num_pages,
                num_windowed=num_windowed,
                device=torch.device("cpu"),
                num_rows=num_rows,
                is_copied=is_copied,
            )
            for num_rows, is_copied in ((MAX_SEQS, True), (0, False), (0, True))
        ]
        self.num_come = self.num_copied = self.num_preempted = self.num_hidden = self.num_ahead = 0

    def come(self) -> None:
        # Few texts: beginnings are found in the cache.
        ids = token_ids([self.random.randrange(3), *range(self.random.randrange(1, 40))])
        self.num_come += 1
        new = Sequence(f"r{self.num_come}", 1, 0, 0.0, self.num_come, ids, len(ids), SamplingParams())
        try:
            self.scheduler.add(new)
        except OverloadedError:
            return

    def fork(self) -> None:
        """Another choice goes on from what one has; both write to copies of the page that they share."""
        scheduler = self.scheduler
        those = [one for one in scheduler.running if one.is_decode]
        if not those or len(scheduler.running) == MAX_SEQS:
            return
        first = self.random.choice(those)
        self.num_come += 1
        second = Sequence(
            f"r{self.num_come}", 1, 1, 0.0, self.num_come, token_ids(first.token_ids), first.num_prompt,
            SamplingParams(), num_computed=first.num_computed, pages=page_table(first.pages),
            windowed=page_table(first.windowed), num_hidden=first.num_hidden,
        )  # fmt: skip
        scheduler.pool.share(scheduler.held_pages(first))
        scheduler.enter(second)

    def end(self) -> None:
        if self.scheduler.running:
            self._end(self.random.choice(self.scheduler.running))

    def _end(self, sequence: Sequence) -> None:
        self.scheduler.pool.release(self.scheduler.retire(sequence))

    def steps(self) -> None:
        """One step, and those that can be planned behind it."""
        batch: Batch | None = self.scheduler.schedule()
        self.num_preempted += len(batch.preempted) if batch else 0
        while batch is not None and batch.items:
            self.num_copied += len(batch.copies)
            inputs = inputs_of(batch)
            for tables in self.kept:
                self._compare(tables, inputs)
            under_way = [tables.tensor.clone() for tables in self.kept]
            behind = self.scheduler.schedule_behind(batch)
            for tables, before in zip(self.kept, under_way, strict=True):
                assert torch.equal(tables.tensor, before), "a step under way reads them"
            self.scheduler.apply(batch, [[self.random.randrange(9)] for item in batch.items if item.samples])
            self.num_hidden += sum(item.sequence.num_hidden > 0 for item in batch.items)
            for sequence in [one for one in self.scheduler.running if len(one.token_ids) > MAX_TOKENS - 2]:
                self._end(sequence)
            if behind is not None:
                self.num_ahead += 1
                behind.items = [item for item in behind.items if item.sequence in self.scheduler.running]
                assert self.scheduler.join(behind)
            batch = behind

    def _compare(self, tables: BlockTables, inputs: list[SequenceInput]) -> None:
        limits = self.scheduler.limits
        rows = tables.rows(inputs)
        for row, one in zip(rows, inputs, strict=True):
            used = pages_for(one.end, PAGE)
            seen = num_hidden_pages(one.start, PAGE, limits.window)
            first = 0 if limits.num_windowed else seen
            assert tables.tensor[0, row, first:used].tolist() == one.pages[first:used].tolist()  # type: ignore[attr-defined]
            for group in range(limits.num_windowed):
                expected = one.windowed[group :: limits.num_windowed][seen:used]
                assert tables.tensor[1 + group, row, seen:used].tolist() == expected.tolist()
        assert (tables.tensor >= 0).all()
        assert (tables.tensor < self.scheduler.pool.num_pages).all()


@pytest.mark.parametrize(
    ("num_pages", "window", "num_windowed"), [(40, 0, 0), (20, 10, 0), (80, 10, 2)], ids=["all", "window", "mixed"]
)
def test_kept_tables_are_those_made_anew(num_pages: int, window: int, num_windowed: int) -> None:
    lives = [_Life(seed, num_pages, window, num_windowed) for seed in range(2)]
    for life in lives:
        events = [life.come] * 4 + [life.fork, life.end] + [life.steps] * 6
        for _ in range(100):
            life.random.choice(events)()
    assert sum(life.num_copied for life in lives)
    assert sum(life.num_preempted for life in lives)
    assert sum(life.num_ahead for life in lives)
    assert all((life.num_hidden > 0) == (window > 0) for life in lives)
