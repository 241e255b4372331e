"""Guides made by threads: one compiles grammars and replays outputs, one makes masks while a step is computed.

A worker that serves no grammar has none of these threads. The vocabulary is made before it serves at all: that holds up
everything in the process.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from functools import cached_property, partial
from typing import Any

import numpy as np

from tandem.core.errors import InternalError, InvalidRequestError, TandemError
from tandem.core.grammar import CompiledGrammar, Matcher, import_llguidance
from tandem.core.grammar_compiler import compile_grammar
from tandem.core.recent import Recent, RecentByCost
from tandem.core.sampling import TokenMask
from tandem.core.vocabulary import Vocabulary
from tandem.worker.counters import WorkerCounters
from tandem.worker.guide import Guide

_log = logging.getLogger(__name__)

# Compiled grammars that are kept, by number and by the length of their texts; the least recently used go first. Those
# that took so long are kept apart: many others would else make a worker compile them again and again.
_MAX_KEPT = 128
_COSTLY_S = 0.05
_MAX_KEPT_CHARS = 4 << 20
# Masks of one step are made by so many threads.
_MAX_THREADS = 8

Masks = list[TokenMask | TandemError]


class Guides:
    """The `GuideMaker` of a worker.

    Args:
        vocabulary: of the model; or why no grammar holds with it.
        submit: queues a call for the runner's thread.
        compiler, masker: run one call at a time, in order; by default a thread each.
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
        self._compiler = compiler or ThreadPoolExecutor(1, "grammars")
        self._masker = masker or ThreadPoolExecutor(1, "masks")
        # Of the compiler's thread.
        self._kept = _kept()

    def close(self) -> None:
        """End the threads. What is under way ends first, what waits is dropped."""
        for pool in (self._compiler, self._masker):
            pool.shutdown(cancel_futures=True)

    # -- compiling

    def prepare(
        self, grammar: str, outputs: Sequence[Sequence[int]], then: Callable[[list[Guide] | TandemError], None]
    ) -> None:
        def work() -> None:
            made = self._prepare(grammar, outputs)
            self._submit(lambda: then(made))

        self._compiler.submit(work)

    def _prepare(self, grammar: str, outputs: Sequence[Sequence[int]]) -> list[Guide] | TandemError:
        try:
            return self._made(grammar, outputs)
        except TandemError as error:
            return error
        except Exception as error:  # noqa: BLE001 - it goes to whoever asked
            _log.exception("a grammar could not be prepared")
            return InternalError(f"a grammar could not be prepared: {type(error).__name__}: {error}")

    def _made(self, grammar: str, outputs: Sequence[Sequence[int]]) -> list[Guide]:
        known = self._kept.get(grammar)
        compiled = self._compiled(grammar)
        try:
            return [_replayed(compiled, output) for output in outputs]
        except (InvalidRequestError, InternalError):
            if compiled is not known:
                raise
            compiled.is_worn = True
        # What other outputs have left of it was too little; a new one has all that there is.
        compiled = self._compiled(grammar)
        return [_replayed(compiled, output) for output in outputs]

    def _compiled(self, grammar: str) -> CompiledGrammar:
        if (known := self._kept.get(grammar)) is not None and not known.is_worn:
            return known
        if isinstance(self._vocabulary, TandemError):
            raise self._vocabulary
        began_s = time.perf_counter()
        compiled = compile_grammar(grammar, self._vocabulary.tokens)
        self._kept.put(grammar, compiled, is_costly=time.perf_counter() - began_s >= _COSTLY_S)
        return compiled

    # -- masks

    def begin(self, guides: Sequence[Guide]) -> None:
        asked = [(guide, new) for guide in guides if (new := guide.take_new()) is not None]
        if asked:
            future = self._masker.submit(self._make_masks, asked)
            for index, (guide, _) in enumerate(asked):
                guide.await_mask(partial(_mask_at, future, index))

    def _make_masks(self, asked: Sequence[tuple[Guide, list[int]]]) -> Masks:
        began_s = time.perf_counter()
        matchers = [_matched(guide, new) for guide, new in asked]
        assert isinstance(self._vocabulary, Vocabulary)  # or there were no guides
        masks = np.zeros((len(asked), self._vocabulary.mask_words), np.int32)
        good = [(matcher.inner, index) for index, matcher in enumerate(matchers) if isinstance(matcher, Matcher)]
        if good:
            self._fill(good, masks)
        made = [_mask_of(matcher, row) for matcher, row in zip(matchers, masks, strict=True)]
        self._counters.num_masks += len(asked)
        self._counters.mask_s += time.perf_counter() - began_s
        return made

    @cached_property
    def _fill(self) -> Callable[[list[tuple[Any, int]], np.ndarray], None]:
        """Fills the rows of masks on several threads; made where there is a grammar."""
        from llguidance.numpy import fill_next_token_bitmask_par

        executor = import_llguidance().LLExecutor(min(_MAX_THREADS, len(os.sched_getaffinity(0))))
        return partial(fill_next_token_bitmask_par, executor)


def _kept() -> RecentByCost[str, CompiledGrammar]:
    """Compiled grammars by their texts."""

    def kept() -> Recent[str, CompiledGrammar]:
        return Recent(_MAX_KEPT, _MAX_KEPT_CHARS, lambda text, _: len(text))

    return RecentByCost(kept(), kept())


def _mask_at(masks: Future[Masks], index: int) -> TokenMask | TandemError:
    """One of the masks of a step, when they are there."""
    return masks.result()[index]


def _replayed(grammar: CompiledGrammar, output: Sequence[int]) -> Guide:
    guide = Guide(grammar)
    if output:
        guide.replay(output)
    return guide


def _matched(guide: Guide, new: list[int]) -> Matcher | TandemError:
    try:
        return guide.match(new)
    except TandemError as error:
        return error


def _mask_of(matcher: Matcher | TandemError, row: np.ndarray) -> TokenMask | TandemError:
    if isinstance(matcher, TandemError):
        return matcher
    try:
        matcher.check()
    except TandemError as error:
        return error
    return row.tobytes()
