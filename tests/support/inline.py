"""What runs where it is called, for virtual time: no threads."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

from tandem.sim.kernel import Kernel
from tandem.worker.counters import WorkerCounters
from tandem.worker.guides import Guides
from tests.support.scripted_model import vocabulary


class InlineExecutor(Executor):
    """Runs each call where it is submitted."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:  # noqa: BLE001 - the caller's
            future.set_exception(error)
        return future


class LateExecutor(Executor):
    """Runs each call so much later, in order."""

    def __init__(self, kernel: Kernel, delay_s: float) -> None:
        self._kernel = kernel
        self._delay_s = delay_s

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._kernel.after(self._delay_s, lambda: future.set_result(fn(*args, **kwargs)))
        return future


def inline_guides(
    submit: Callable[[Callable[[], None]], None], counters: WorkerCounters, compiler: Executor | None = None
) -> Guides:
    """Guides for the scripted model."""
    return Guides(vocabulary(), submit, counters, compiler=compiler or InlineExecutor(), masker=InlineExecutor())
