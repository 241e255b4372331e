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
from typing import Protocol

import torch

from tandem.core.errors import InternalError
from tandem.engine.engine import Engine, SequenceInput
from tandem.worker.scheduler import Batch, BatchScheduler

_log = logging.getLogger(__name__)

# A step that fails takes its requests with it. So many in a row, and the process is no use any more.
_MAX_FAILED_STEPS = 3


class Role(Protocol):
    """What a worker does around a step. All calls come on the runner thread."""

    def give_way(self) -> bool:
        """Begin the next step later where that is better for all, for a bounded time; whether the inbox may tell of
        more now. Asked again until it does not."""

    def before_schedule(self) -> None:
        """Pages and places may have come free since the last step."""

    def before_forward(self, batch: Batch) -> Callable[[int], None] | None:
        """A step is about to be computed; returns what to call as each layer's KV lies in the arena."""

    def sample(self, batch: Batch, logits: torch.Tensor) -> list[int]:
        """One token for each item that samples. `logits`: float32 `[items that sample, vocab]`."""

    def after_step(self, batch: Batch) -> None:
        """The step is booked: its tokens are in the sequences."""

    def step_failed(self, batch: Batch, error: Exception) -> None:
        """The step raised: end what it held."""

    def going_idle(self) -> None:
        """Nothing can be computed now; the next thing is an entry of the inbox."""


class Runner:
    """Runs steps until it is stopped.

    Args:
        on_fatal: called once, on the runner thread, with what ended it before `stop`.
        on_work, on_rest: called, on the runner thread, before each step, and when there is nothing to compute.
    """

    def __init__(
        self,
        engine: Engine,
        scheduler: BatchScheduler,
        *,
        name: str,
        on_fatal: Callable[[BaseException], None],
        on_work: Callable[[], None],
        on_rest: Callable[[], None],
    ) -> None:
        self.engine = engine
        self.scheduler = scheduler
        self._on_fatal = on_fatal
        self._on_work = on_work
        self._on_rest = on_rest
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._role: Role | None = None
        self._stopping = False
        self._num_failed_steps = 0
        # Since when the present turn has been running, on the monotonic clock; read by the watchdog.
        self.busy_since_s: float | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self, role: Role) -> None:
        self._role = role
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
        try:
            while not self._stopping:
                self._turn()
        except BaseException as error:  # noqa: BLE001 - handed on; nobody is above a thread
            _log.exception("the runner failed")
            self._on_fatal(error)
        finally:
            self.busy_since_s = None

    def _turn(self) -> None:
        role = self._role
        assert role is not None
        self.busy_since_s = time.monotonic()
        self._drain_inbox()
        while not self._stopping and role.give_way():
            self.busy_since_s = time.monotonic()
            self._drain_inbox()  # the next step is that of what has come meanwhile, too
        if self._stopping:
            return
        role.before_schedule()
        batch = self.scheduler.schedule()
        if batch.items:
            self._on_work()
            self._step(role, batch)
            return
        role.going_idle()
        self._on_rest()
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

    def _step(self, role: Role, batch: Batch) -> None:
        try:
            for source, target in batch.copies:
                self.engine.arena.copy_page(source, target)
            on_layer = role.before_forward(batch)
            logits = self.engine.forward(_inputs(batch), on_layer)
            sampled: Sequence[int] = role.sample(batch, logits)
            if not sampled:  # else its tokens were waited for: who frees these pages now may let others write to them
                self.engine.finish()
        except Exception as error:
            self._num_failed_steps += 1
            _log.exception("a step of %d sequences failed", len(batch.items))
            if self._num_failed_steps >= _MAX_FAILED_STEPS:
                raise
            self.engine.finish()  # as above, of what was begun
            role.step_failed(batch, error)
            return
        self._num_failed_steps = 0
        self.scheduler.apply(batch, sampled)
        role.after_step(batch)


def _inputs(batch: Batch) -> list[SequenceInput]:
    return [
        SequenceInput(
            token_ids=item.sequence.token_ids[item.start : item.start + item.num_tokens],
            start=item.start,
            pages=item.sequence.pages,
            num_logits=1 if item.samples else 0,
        )
        for item in batch.items
    ]
