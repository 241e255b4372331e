"""Runs the steps of one worker in virtual time, as `tandem.worker.runner.Runner` does on a thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np

from tandem.sim.kernel import Kernel
from tandem.worker.batch import Batch
from tandem.worker.next_step import NextStep
from tandem.worker.scheduler import BatchScheduler
from tandem.worker.step import AheadHooks, StepHooks
from tests.support.scripted_model import NUM_LAYERS, Memory


class StepTimes(Protocol):
    """What a step takes, in seconds."""

    def of(self, batch: Batch) -> float: ...


@dataclass(frozen=True, slots=True)
class StepTime:
    """So much, and so much a token."""

    base_s: float
    token_s: float

    def of(self, batch: Batch) -> float:
        return self.base_s + self.token_s * batch.num_tokens


class StepRunner:
    """What is submitted runs between two steps, in order; with nothing to compute, at once."""

    def __init__(
        self,
        kernel: Kernel,
        scheduler: BatchScheduler,
        memory: Memory,
        step_time: StepTimes,
        *,
        ahead: bool = False,
    ) -> None:
        self._kernel = kernel
        self._scheduler = scheduler
        self._memory = memory
        self._step_time = step_time
        self._ahead = ahead
        self._inbox: deque[Callable[[], object]] = deque()
        self._is_busy = False  # a step is computed, or the next turn is on its way
        self._hooks: StepHooks
        self.is_stopped = False
        self.num_steps = 0

    def start(self, hooks: StepHooks, ahead: AheadHooks | None = None) -> None:
        self._hooks = hooks
        self._steps = NextStep(self._scheduler, hooks, ahead=ahead if self._ahead else None)

    def submit(self, call: Callable[[], object]) -> None:
        self._inbox.append(call)
        if not self._is_busy:
            self._is_busy = True
            self._kernel.after(0.0, self._turn)

    def _turn(self) -> None:
        if self.is_stopped:
            return
        while self._inbox:
            self._inbox.popleft()()
        hooks = self._hooks
        batch = self._steps.next()
        self._scheduler.pool.check()
        assert not any(s.promoted for s in batch.preempted), "decode's pages wait for it: it must not lose its own"
        if batch.items:
            self._begin(batch)
        else:
            hooks.going_idle()
            self._is_busy = bool(self._inbox)
            if self._is_busy:
                self._kernel.after(0.0, self._turn)

    def _begin(self, batch: Batch) -> None:
        self.num_steps += 1
        for source, target in batch.copies:
            self._memory.copy_page(source, target)
        on_layer = self._hooks.before_forward(batch)
        items = []
        for item in batch.items:
            wanted = self._memory.kv_of(item.sequence, item.start + item.num_tokens)
            items.append((wanted, item.start, list(item.sequence.pages), list(item.sequence.windowed)))
        self._steps.while_computed(batch)

        def compute(layer: int) -> None:
            if self.is_stopped:
                return
            for wanted, start, pages, windowed in items:
                self._memory.compute(layer, wanted, start, pages, windowed)
            if on_layer is not None:
                on_layer(layer)

        step_s = self._step_time.of(batch)
        for layer in range(NUM_LAYERS):
            self._kernel.after(step_s * (layer + 1) / NUM_LAYERS, partial(compute, layer))
        self._kernel.after(step_s, lambda: self._end(batch))

    def _end(self, batch: Batch) -> None:
        if self.is_stopped:
            return
        if batch.num_scored_tokens:
            logits = self._hooks.score(batch, self._logits(batch))
        else:
            logits = np.arange(sum(item.num_logits for item in batch.items))
        self._steps.computed(batch, self._hooks.sample(batch, logits))
        self._turn()

    def _logits(self, batch: Batch) -> np.ndarray:
        """As `tandem.engine.engine.Engine.forward`: a row is the hash of all tokens up to there."""
        rows = []
        for item in batch.items:
            hashes = self._memory.kv_of(item.sequence, item.start + item.num_tokens)
            rows.append(hashes[len(hashes) - item.num_logits :])
        return np.concatenate(rows)

