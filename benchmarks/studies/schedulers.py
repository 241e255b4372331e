"""Schedulers that we do not ship: what continuous batches and pages replaced, on the shipped one's own code."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from functools import partial

from tandem.core.pages import PagePool, pages_for
from tandem.sim.machine import SALT, SchedulerMaker
from tandem.worker.batch import Batch, SchedulerLimits
from tandem.worker.scheduler import BatchScheduler
from tandem.worker.sequence import Sequence


class StaticScheduler(BatchScheduler):
    """A batch is made of those who wait, and nobody joins it until all of it have ended.

    Kinder than the servers that batched so: an answer is given out as it is generated, and one that has ended takes no
    time of a step. These computed each batch up to its longest answer, with padding behind the others.
    """

    def __init__(self, pool: PagePool, limits: SchedulerLimits) -> None:
        super().__init__(pool, limits, salt=SALT, prefix_cache=False)
        self._members: set[Sequence] = set()

    def schedule(self) -> Batch:
        if self._members.isdisjoint((*self.running, *self.waiting)):
            self._members = set(self.waiting[: self.limits.max_num_seqs])
        # Those come first: who waits is sorted by arrival, and so are members that lost their pages.
        later = [sequence for sequence in self.waiting if sequence not in self._members]
        self.waiting = [sequence for sequence in self.waiting if sequence in self._members]
        batch = super().schedule()
        self.waiting += later
        return batch


class Runs:
    """Which slots of a memory are free, as runs of neighbours: the first that is long enough is given.

    In pages, as all of a worker's room is counted in them.
    """

    def __init__(self, num_pages: int) -> None:
        self._free = [range(num_pages)]  # sorted, none empty, no two adjacent

    def take(self, num: int) -> range | None:
        """`None`: no run is long enough, even if there is as much in all."""
        for index, run in enumerate(self._free):
            if len(run) >= num:
                self._free[index : index + 1] = [run[num:]] if len(run) > num else []
                return run[:num]
        return None

    def give_back(self, run: range) -> None:
        found: list[range] = []
        for one in sorted((*self._free, run), key=lambda each: each.start):
            if found and found[-1].stop == one.start:
                found[-1] = range(found[-1].start, one.stop)
            else:
                found.append(one)
        self._free = found


class ContiguousScheduler(BatchScheduler):
    """Each sequence has its KV in one run of neighbouring slots, taken when it is admitted: as memory was used before
    PagedAttention (Kwon et al., SOSP 2023).

    Args:
        longest: tokens for which each has room, or for its own where these are more; `None`: just for its own, whose
            number nobody knows in advance.
    """

    def __init__(self, pool: PagePool, limits: SchedulerLimits, *, longest: int | None) -> None:
        super().__init__(pool, limits, salt=SALT, prefix_cache=False)
        self._longest = longest
        self._runs = Runs(pool.num_pages)
        self._run_of: dict[Sequence, range] = {}

    def _give_pages(self, batch: Batch, sequence: Sequence) -> bool:
        num_tokens = max(self._longest or 0, sequence.num_prompt + sequence.params.max_tokens)
        run = self._runs.take(pages_for(num_tokens, self.pool.page_size))
        if run is None:
            return False
        if not super()._give_pages(batch, sequence):
            self._runs.give_back(run)
            return False
        rest = self.pool.allocate(len(run) - len(sequence.pages))
        assert rest is not None, "the pool has what its runs have"
        sequence.pages.extend(rest)
        self._run_of[sequence] = run
        return True

    def remove(self, sequence: Sequence) -> Seq[int]:
        if (run := self._run_of.pop(sequence, None)) is not None:
            self._runs.give_back(run)
        return super().remove(sequence)


def contiguous(longest: int | None) -> SchedulerMaker:
    return partial(ContiguousScheduler, longest=longest)
