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
    """What it returns. Raises `KeyboardInterrupt` where SIGINT, SIGTERM or SIGHUP came: what was started is ended by
    each of them."""

    async def ended_by_signals() -> _T:
        _end_by_signals()
        return await work()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(ended_by_signals())


def _end_by_signals() -> None:
    """What ends us must end what we started, as Ctrl-C does; but `nohup` keeps its meaning."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            asyncio.get_running_loop().add_signal_handler(number, signal.raise_signal, signal.SIGINT)


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
