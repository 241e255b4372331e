"""How measurements run in an event loop: they end what they have started however they are ended."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

import uvloop

_T = TypeVar("_T")


def in_loop(work: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
    """What it returns. SIGTERM cancels it, as SIGINT does: what was started is ended either way."""

    async def cancellable() -> _T:
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        return await work()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(cancellable())


@contextlib.asynccontextmanager
async def beside(*works: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """These run beside the block, until it ends. What one of them raises ends the block, which raises it then."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(work) for work in works]
            yield
            for task in tasks:
                task.cancel()
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from failed
