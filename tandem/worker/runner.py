"""The runner: the one thread of a worker that owns the batch scheduler, the page accounting and the engine.

Everything else talks to it by `submit`, which runs a call between two steps. With nothing to compute it blocks on its
inbox: an idle worker costs nothing.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence

from tandem.core.errors import InternalError
from tandem.core.slices import take_usual_slices
from tandem.engine.batch import SequenceInput
from tandem.worker.batch import Batch
from tandem.worker.next_step import NextStep
from tandem.worker.pacing import Pacing
from tandem.worker.scheduler import BatchScheduler
from tandem.worker.step import AheadHooks, StepHooks
from tandem.worker.step_engine import StepEngine
from tandem.worker.step_log import StepLog, terms_of

_log = logging.getLogger(__name__)

# A step that fails takes its requests with it. So many in a row, and the process is no use any more.
_MAX_FAILED_STEPS = 3


class Runner:
    """Runs steps until it is stopped.

    Args:
        on_fatal: called once, on the runner thread, with what ended it before `stop`.
        pacing: hears of each step and of each rest.
        step_log: gets each step's terms and time; `None`: nobody asked for them.
    """

    def __init__(
        self,
        engine: StepEngine,
        scheduler: BatchScheduler,
        *,
        name: str,
        on_fatal: Callable[[BaseException], None],
        pacing: Pacing,
        step_log: StepLog | None = None,
    ) -> None:
        self.engine = engine
        self.scheduler = scheduler
        self._on_fatal = on_fatal
        self._pacing = pacing
        self._step_log = step_log
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._hooks: StepHooks | None = None
        self._next: NextStep | None = None
        self._stopping = False
        self._num_failed_steps = 0
        # Since when the present turn has been running, on the monotonic clock; read by the watchdog.
        self.busy_since_s: float | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self, hooks: StepHooks, ahead: AheadHooks | None = None) -> None:
        """`ahead`: as of `NextStep`, where the engine computes apart."""
        self._hooks = hooks
        self._next = NextStep(self.scheduler, hooks, ahead=ahead if self.engine.computes_apart else None)
        self._thread.start()

    def submit(self, call: Callable[[], None]) -> None:
        """Run `call` on the runner thread before its next step; from any thread, in order."""
        self._inbox.put(call)

    def stop(self, timeout_s: float = 30.0) -> None:
        """End after the current step and wait for the thread.

        Raises:
            InternalError: it did not end in time.
        """

        def leave() -> None:
            self._stopping = True

        self.submit(leave)
        if self._thread.is_alive():
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                raise InternalError(f"the runner did not end within {timeout_s} s")

    def _run(self) -> None:
        take_usual_slices()
        try:
            while not self._stopping:
                self._turn()
        except BaseException as error:  # noqa: BLE001 - handed on; nobody is above a thread
            _log.exception("the runner failed")
            self._on_fatal(error)
        finally:
            self.busy_since_s = None

    def _turn(self) -> None:
        hooks, steps = self._hooks, self._next
        assert hooks is not None
        assert steps is not None
        self.busy_since_s = time.monotonic()
        self._drain_inbox()
        if self._stopping:
            steps.tell()
            return
        began_s = time.monotonic()
        batch = steps.next()
        if batch.items:
            self._pacing.step_begins(self.scheduler.pool.first_untouched)
            if self._step_log is None:
                self._step(hooks, steps, batch)
            else:
                terms = terms_of(batch, self._step_log.windows)
                self._step(hooks, steps, batch)
                self._step_log.note(terms, time.monotonic() - began_s, began_s)
            return
        hooks.going_idle()
        if self._step_log is not None:
            self._step_log.flush()
        self._pacing.rest()
        self.busy_since_s = None
        call = self._inbox.get()
        self.busy_since_s = time.monotonic()
        call()

    def _drain_inbox(self) -> None:
        while True:
            try:
                call = self._inbox.get_nowait()
            except queue.Empty:
                return
            call()

    def _step(self, hooks: StepHooks, steps: NextStep, batch: Batch) -> None:
        try:
            for source, target in batch.copies:
                self.engine.arena.copy_page(source, target)
            on_layer = hooks.before_forward(batch)
            logits = self.engine.forward(inputs_of(batch), on_layer)
        except Exception as error:  # noqa: BLE001 - of any kind; it is logged, and its requests hear of it
            self._failed(steps, batch, error)
            return
        steps.while_computed(batch)
        try:
            if self.engine.computes_apart and _needs_its_end(batch):
                self.engine.finish()
            if batch.num_scored_tokens:
                logits = hooks.score(batch, logits)
            sampled: Sequence[Sequence[int]] = hooks.sample(batch, logits)
            if not any(sampled):
                # Else sampling has waited for the device, which must be done with pages that are freed now.
                self.engine.finish()
        except Exception as error:  # noqa: BLE001 - as above
            self._failed(steps, batch, error)
            return
        self._num_failed_steps = 0
        steps.computed(batch, sampled)

    def _failed(self, steps: NextStep, batch: Batch, error: Exception) -> None:
        self._num_failed_steps += 1
        _log.error("a step of %d sequences failed", len(batch.items), exc_info=error)
        if self._num_failed_steps >= _MAX_FAILED_STEPS:
            raise error
        self.engine.finish()  # as above
        steps.failed(batch, error)


def _needs_its_end(batch: Batch) -> bool:
    """Whether it matters how long a step took when it is sampled: masks have as long as that, and where sampling does
    not wait for the device, nothing else shows it."""
    sampled = [item for item in batch.items if item.samples]
    return not sampled or any(item.sequence.params.grammar for item in sampled)


def inputs_of(batch: Batch) -> list[SequenceInput]:
    """What the engine computes in this step."""
    return [
        SequenceInput(
            token_ids=[*item.sequence.token_ids[item.start : item.start + item.num_tokens], *item.guesses],
            start=item.start,
            pages=item.sequence.pages,
            num_logits=item.num_logits,
            windowed=item.sequence.windowed,
        )
        for item in batch.items
    ]
