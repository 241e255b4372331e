"""Guides made by threads: one compiles grammars and replays outputs, others make masks while a step is computed.

Nobody waits for the masks of others. Those that are expected to take long have threads of their own, and a step that is
computed goes on without the choices whose masks are not there yet (`Guides.late`).

A worker that serves no grammar has none of these threads. The vocabulary is made before it serves at all: that holds up
everything in the process.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, ThreadPoolExecutor, wait

from tandem.core.errors import CancelledError, InternalError, InvalidRequestError, SlowGrammarError, TandemError
from tandem.core.grammar import CompiledGrammar
from tandem.core.grammar_compiler import compile_grammar
from tandem.core.recent import Recent, RecentByCost
from tandem.core.slices import take_usual_slices
from tandem.core.vocabulary import Vocabulary
from tandem.worker.counters import WorkerCounters
from tandem.worker.guide import Guide, Mask, made_of

_log = logging.getLogger(__name__)

# Compiled grammars that are kept, by number and by the length of their texts; the least recently used go first. Those
# that took so long are kept apart: many others would else make a worker compile them again and again.
_MAX_KEPT = 128
_COSTLY_S = 0.05
_MAX_KEPT_CHARS = 4 << 20
# Masks of one step are made by so many threads, in turns of so many masks that take no time.
_MAX_THREADS = 8
_NUM_A_THREAD = 4
# A step waits so long for masks that are late, or for this part of what it has taken: less than a mask takes that is
# late because the processors have much to do, and little beside the step.
_LEAST_WAIT_S, _WAIT_PART = 0.001, 0.1
# Outputs are replayed so long at a time; then those have their turn who have come meanwhile.
_REPLAY_S = 0.05


class Guides:
    """The `GuideMaker` of a worker.

    Args:
        vocabulary: of the model; or why no grammar holds with it.
        submit: queues a call for the runner's thread.
        compiler: runs one call at a time, in order; by default a thread.
        masker: makes masks; by default threads, of which those that are expected to take long have half.
    """

    def __init__(
        self,
        vocabulary: Vocabulary | TandemError,
        submit: Callable[[Callable[[], None]], None],
        counters: WorkerCounters,
        *,
        compiler: Executor | None = None,
        masker: Executor | None = None,
    ) -> None:
        self._vocabulary = vocabulary
        self._submit = submit
        self._counters = counters
        self._num_threads = min(_MAX_THREADS, len(os.sched_getaffinity(0)))
        self._compiler = compiler or ThreadPoolExecutor(1, "grammars", take_usual_slices)
        self._masker = masker or ThreadPoolExecutor(self._num_threads, "masks", take_usual_slices)
        num_slow = max(1, self._num_threads // 2)
        self._slow_masker = masker or ThreadPoolExecutor(num_slow, "slow masks", take_usual_slices)
        self._began_s = 0.0  # when `begin` was called last
        self._counting = threading.Lock()
        # Of the compiler's thread.
        self._kept = _kept()

    def close(self) -> None:
        """End the threads. What is under way ends first, and all masks, which a step may wait for."""
        self._compiler.shutdown(cancel_futures=True)
        for pool in (self._masker, self._slow_masker):
            pool.shutdown()

    # -- compiling

    def prepare(
        self,
        grammar: str,
        outputs: Sequence[Sequence[int]],
        then: Callable[[list[Guide] | TandemError], None],
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> None:
        made = self._made(grammar, outputs)

        def work() -> None:
            found = self._worked_on(made) if is_wanted() else CancelledError("nobody waits for it any more")
            if found is None:
                self._compiler.submit(work)
            else:
                self._submit(lambda: then(found))

        self._compiler.submit(work)

    def _worked_on(self, made: Iterator[list[Guide] | None]) -> list[Guide] | TandemError | None:
        """What comes of it; `None`: it has had its time, and others have theirs before it goes on."""
        ends_s = time.perf_counter() + _REPLAY_S
        try:
            while (found := next(made)) is None and time.perf_counter() < ends_s:
                pass
        except TandemError as error:
            with self._counting:
                self._counters.num_slow_grammars += isinstance(error, SlowGrammarError)
            return error
        except Exception as error:  # noqa: BLE001 - it goes to whoever asked
            _log.exception("a grammar could not be prepared")
            return InternalError(f"a grammar could not be prepared: {type(error).__name__}: {error}")
        return found

    def _made(self, grammar: str, outputs: Sequence[Sequence[int]]) -> Iterator[list[Guide] | None]:
        """The guides, after a `None` for each token that was replayed."""
        known = self._kept.get(grammar)
        compiled = self._compiled(grammar)
        try:
            guides = yield from _replayed(compiled, outputs)
        except SlowGrammarError:
            raise
        except (InvalidRequestError, InternalError):
            if compiled is not known:
                raise
            compiled.is_worn = True
            # What other outputs have left of it was too little; a new one has all that there is.
            guides = yield from _replayed(self._compiled(grammar), outputs)
        yield guides

    def _compiled(self, grammar: str) -> CompiledGrammar:
        if (known := self._kept.get(grammar)) is not None and not known.is_worn:
            return known
        if isinstance(self._vocabulary, TandemError):
            raise self._vocabulary
        began_s = time.thread_time()  # not what others take of a busy processor
        compiled = compile_grammar(grammar, self._vocabulary.tokens)
        self._kept.put(grammar, compiled, is_costly=time.thread_time() - began_s >= _COSTLY_S)
        return compiled

    # -- masks

    def begin(self, guides: Sequence[Guide]) -> None:
        self._began_s = time.perf_counter()
        quick = deque[_Asked]()
        for guide in guides:
            if (begun := guide.begin()) is not None:
                asked = (guide, *begun)
                if guide.budget.is_slow:
                    self._slow_masker.submit(self._make, asked)
                else:
                    quick.append(asked)
                self._counters.num_masks += 1
        for _ in range(min(self._num_threads, -(-len(quick) // _NUM_A_THREAD))):
            self._masker.submit(self._make_all, quick)

    def late(self, guides: Sequence[Guide | None], *, awaits_one: bool) -> set[int]:
        pending = {mask: at for at, guide in enumerate(guides) if guide is not None and (mask := guide.pending)}
        if not pending:
            return set()
        if awaits_one and len(pending) == len(guides):
            wait(pending, return_when=FIRST_COMPLETED)
        wait(pending, timeout=max(_LEAST_WAIT_S, _WAIT_PART * (time.perf_counter() - self._began_s)))
        return {at for mask, at in pending.items() if not mask.done()}

    def _make_all(self, left: deque[_Asked]) -> None:
        """Make what is left, beside other threads that do."""
        while True:
            try:
                asked = left.popleft()
            except IndexError:
                return
            self._make(asked)

    def _make(self, asked: _Asked) -> None:
        guide, mask, token_ids = asked
        began_s = time.thread_time()
        made = made_of(guide, token_ids)
        with self._counting:  # before anybody hears of it
            self._counters.mask_s += time.thread_time() - began_s
            self._counters.num_slow_grammars += isinstance(made, SlowGrammarError)
        mask.set_result(made)


def _replayed(compiled: CompiledGrammar, outputs: Sequence[Sequence[int]]) -> Generator[None, None, list[Guide]]:
    """Guides of these outputs; it stops behind each token."""
    guides = [Guide(compiled, time.thread_time) for _ in outputs]
    for guide, output in zip(guides, outputs, strict=True):
        yield from guide.replay(output)
    return guides


_Asked = tuple[Guide, Mask, list[int]]
"""A guide, its mask that is to be made, and the tokens that it has not matched."""


def _kept() -> RecentByCost[str, CompiledGrammar]:
    """Compiled grammars by their texts."""

    def kept() -> Recent[str, CompiledGrammar]:
        return Recent(_MAX_KEPT, _MAX_KEPT_CHARS, lambda text, _: len(text))

    return RecentByCost(kept(), kept())
