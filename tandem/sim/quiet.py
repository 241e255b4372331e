"""Steps in which nothing happens but one more token for each sequence: taken at once, and not one by one. Pure.

Nearly all steps of a decode worker are so. Nothing of them needs to be decided: who computes, what ends and who gets
pages stays as it is, until a sequence comes, ends, or finds no page. With a prefix cache, pages that fill are entered
and the oldest cached ones make room for new ones, as many and the same ones as in single steps: nobody comes meanwhile
who would find a page, and so change which is the oldest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tandem.core.pages import pages_for
from tandem.core.step_times import StepTimes, Terms
from tandem.worker.scheduler import BatchScheduler
from tandem.worker.sequence import Sequence


def quiet_steps(scheduler: BatchScheduler, most: int) -> int:
    """How many steps follow, up to `most`, in which each running sequence gets a token, none ends, and all find pages;
    0: the next one must be planned."""
    running, pool = scheduler.running, scheduler.pool
    if scheduler.waiting or not 0 < len(running) <= scheduler.limits.max_num_batched_tokens:
        return 0
    for sequence in running:
        if not sequence.is_decode or sequence.guesses or sequence.scoring is not None or sequence.pooling is not None:
            return 0
        if pool.references(sequence.pages[-1]) > 1:
            return 0  # it would be copied
        if scheduler.prefix_cache and sequence.num_published < sequence.num_computed // pool.page_size:
            return 0  # pages that came computed enter the cache a part in each step
        most = min(most, sequence.params.max_tokens - sequence.num_output - 1)
    if most < 1:
        return 0
    if _num_new_pages(scheduler, most) <= pool.num_available:
        return most
    low, high = 0, most  # `low` steps find pages, `high` do not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if _num_new_pages(scheduler, middle) <= pool.num_available else (low, middle)
    return low


def _num_new_pages(scheduler: BatchScheduler, num_steps: int) -> int:
    size = scheduler.pool.page_size
    return sum(
        max(0, pages_for(sequence.num_computed + num_steps, size) - len(sequence.pages))
        for sequence in scheduler.running
    )


def advance(scheduler: BatchScheduler, num_steps: int, token_of: Callable[[Sequence], int]) -> None:
    """Take so many of the steps that `quiet_steps` has promised; each sequence gets the same token in each."""
    size = scheduler.pool.page_size
    for sequence in scheduler.running:
        end = sequence.num_computed + num_steps
        pages = scheduler.pool.allocate(max(0, pages_for(end, size) - len(sequence.pages)))
        assert pages is not None, "quiet_steps has counted them"
        sequence.pages.extend(pages)
        sequence.token_ids.extend([token_of(sequence)] * num_steps)
        sequence.num_computed = end
        scheduler.publish_computed(sequence)


def quiet_times(scheduler: BatchScheduler, times: StepTimes) -> Iterator[float]:
    """Seconds of the next quiet step, of the one behind it, and so on."""
    num_rows = len(scheduler.running)
    num_read = sum(len(sequence.token_ids) for sequence in scheduler.running)
    while True:
        yield times.seconds(Terms(num_rows, num_rows, num_read, float(num_read)))
        num_read += num_rows
