"""Steps in which nothing happens but one more token for each sequence: taken at once, and not one by one. Pure.

Nearly all steps of a decode worker are so. Nothing of them needs to be decided: who computes, what ends and who gets
pages stays as it is, until a sequence comes, ends, or finds no page. With a prefix cache, pages that fill are entered
and the oldest cached ones make room for new ones, as many and the same ones as in single steps: nobody comes meanwhile
who would find a page, and so change which is the oldest.

Where layers have a window, pages also leave their sequences, and some that a step takes have left another one in the
step before. So there they are taken and given back in the order in which single steps would (`_changes`). In a mixed
model a sequence takes several at once, and gives those of the layers with a window back.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from heapq import heapify, heapreplace

from tandem.core.pages import num_hidden_pages, pages_for
from tandem.core.step_times import StepTimes, Terms
from tandem.worker.scheduler import BatchScheduler
from tandem.worker.sequence import Sequence


def quiet_steps(scheduler: BatchScheduler, most: int) -> int:
    """How many steps follow, up to `most`, in which each running sequence gets a token, none ends, and all find pages;
    0: the next one must be planned."""
    running, window = scheduler.running, scheduler.limits.window
    if scheduler.waiting or not 0 < len(running) <= scheduler.limits.max_num_batched_tokens:
        return 0
    for sequence in running:
        if not sequence.is_decode or sequence.guesses or sequence.scoring is not None or sequence.pooling is not None:
            return 0
        if _would_be_copied(scheduler, sequence) or (scheduler.prefix_cache and _has_to_publish(scheduler, sequence)):
            return 0
        most = min(most, sequence.params.max_tokens - sequence.num_output - 1)
    if most < 1:
        return 0
    num_available = scheduler.pool.num_available
    if _num_new_pages(scheduler, most) <= num_available:
        return most
    if window:
        return _steps_with_pages(scheduler, most)
    low, high = 0, most  # `low` steps find pages, `high` do not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if _num_new_pages(scheduler, middle) <= num_available else (low, middle)
    return low


def _would_be_copied(scheduler: BatchScheduler, sequence: Sequence) -> bool:
    """Whether the page that it writes to may be another's too."""
    num_places = len(sequence.pages)
    last = scheduler.groups.listed(sequence.pages, sequence.windowed, sequence.num_hidden, num_places - 1)
    return any(scheduler.pool.references(page) > 1 for page in last)


def _has_to_publish(scheduler: BatchScheduler, sequence: Sequence) -> bool:
    """Whether pages that came computed are left to enter the cache, a part in each step."""
    if not scheduler.limits.window:
        return sequence.num_published < sequence.num_computed // scheduler.pool.page_size
    return scheduler.limits.num_windowed > 0 and sequence.num_published < sequence.num_hidden


def _num_new_pages(scheduler: BatchScheduler, num_steps: int) -> int:
    """With none given back."""
    size = scheduler.pool.page_size
    return scheduler.groups.num_of_place * sum(
        max(0, pages_for(sequence.num_computed + num_steps, size) - len(sequence.pages))
        for sequence in scheduler.running
    )


def advance(scheduler: BatchScheduler, num_steps: int, token_of: Callable[[Sequence], int]) -> None:
    """Take so many of the steps that `quiet_steps` has promised; each sequence gets the same token in each."""
    if scheduler.limits.window:
        _advance_in_windows(scheduler, num_steps, token_of)
        return
    size = scheduler.pool.page_size
    for sequence in scheduler.running:
        end = sequence.num_computed + num_steps
        pages = scheduler.pool.allocate(max(0, pages_for(end, size) - len(sequence.pages)))
        assert pages is not None, "quiet_steps has counted them"
        sequence.pages.extend(pages)
        _add_tokens(sequence, end, token_of)
        scheduler.publish_computed(sequence)


def _add_tokens(sequence: Sequence, num_computed: int, token_of: Callable[[Sequence], int]) -> None:
    sequence.token_ids.extend([token_of(sequence)] * (num_computed - sequence.num_computed))
    sequence.num_computed = num_computed


def quiet_times(scheduler: BatchScheduler, times: StepTimes) -> Iterator[float]:
    """Seconds of the next quiet step, of the one behind it, and so on."""
    num_rows, windows = len(scheduler.running), times.windows
    contexts = [len(sequence.token_ids) for sequence in scheduler.running]
    num_read, num_steps = sum(contexts), 0
    num_windowed = sum(min(context, windows.window) for context in contexts)
    # Of those that see all yet, in how many steps their context is as long as the window.
    growing = sorted(windows.window - context for context in contexts if context < windows.window)
    while True:
        read = windows.mean(num_read, num_windowed)
        yield times.seconds(Terms(num_rows, num_rows, read, float(read)))
        num_read += num_rows
        num_windowed += len(growing) - bisect_right(growing, num_steps)
        num_steps += 1


# -- windows


def _changes(scheduler: BatchScheduler, num_steps: int) -> Iterator[tuple[int, Sequence, range]]:
    """In which of the steps that follow, counted from 1, who takes the pages of a place (then the range is empty), or
    gives back those of leading places that no layer with a window sees any more: these. In their order: in a step all
    take theirs before any gives back.
    """
    size, window, running = scheduler.pool.page_size, scheduler.limits.window, scheduler.running
    starts = [sequence.num_computed for sequence in running]
    num_pages = [len(sequence.pages) for sequence in running]
    num_hidden = [sequence.num_hidden for sequence in running]

    def takes(index: int) -> tuple[int, bool, int]:
        return num_pages[index] * size - starts[index] + 1, False, index

    def gives(index: int) -> tuple[int, bool, int]:
        step = (num_hidden[index] + 1) * size + window - 1 - starts[index]
        return max(1, step), True, index  # one that came with more pages than it sees gives them back at once

    following = [change(index) for index in range(len(running)) for change in (takes, gives)]
    heapify(following)
    while following and following[0][0] <= num_steps:
        step, is_back, index = following[0]
        given = range(0)
        if is_back:
            given = range(num_hidden[index], num_hidden_pages(starts[index] + step, size, window))
            num_hidden[index] = given.stop
        else:
            num_pages[index] += 1
        heapreplace(following, gives(index) if is_back else takes(index))
        yield step, running[index], given


def _steps_with_pages(scheduler: BatchScheduler, most: int) -> int:
    """Of `most` steps the first ones in which all find pages. A page that several have comes back with the last of
    them; here it counts as never coming back."""
    pool, num_available, of_place = scheduler.pool, scheduler.pool.num_available, scheduler.groups.num_of_place
    for step, sequence, given in _changes(scheduler, most):
        if given:
            table, of_given = scheduler.sliding(sequence)
            # Those behind them are taken in these steps.
            held = table[given.start * of_given : given.stop * of_given]
            num_available += len(given) * of_given - sum(pool.references(page) > 1 for page in held)
        elif num_available >= of_place:
            num_available -= of_place
        else:
            return step - 1
    return most


def _advance_in_windows(scheduler: BatchScheduler, num_steps: int, token_of: Callable[[Sequence], int]) -> None:
    ends = [sequence.num_computed + num_steps for sequence in scheduler.running]
    starts = {id(sequence): sequence.num_computed for sequence in scheduler.running}
    for step, sequence, given in _changes(scheduler, num_steps):
        if given:
            _add_tokens(sequence, starts[id(sequence)] + step, token_of)
            scheduler.slide(sequence)
        else:
            is_there = scheduler.grow(sequence, len(sequence.pages) + 1)
            assert is_there, "quiet_steps has counted them"
    for sequence, end in zip(scheduler.running, ends, strict=True):
        _add_tokens(sequence, end, token_of)
