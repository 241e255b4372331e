"""What measurements run in: work beside a block, and the end of both."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator

import pytest

from benchmarks.in_loop import beside, in_loop
from tandem.core.errors import TandemError


async def for_ever(ended: list[str]) -> None:
    try:
        await asyncio.Event().wait()
    finally:
        ended.append("other work")


async def test_what_runs_beside_a_block_ends_with_it() -> None:
    ended: list[str] = []
    async with beside(for_ever(ended)):
        await asyncio.sleep(0)
    assert ended == ["other work"]


async def test_what_fails_beside_a_block_is_what_ends_it() -> None:
    ended: list[str] = []

    async def fail() -> None:
        raise TandemError("the nodes cannot be seen")

    with pytest.raises(TandemError, match="the nodes cannot be seen"):
        async with beside(for_ever(ended), fail()):
            await for_ever(ended)
    assert ended == ["other work"] * 2


async def test_what_a_block_raises_stays_what_it_is() -> None:
    ended: list[str] = []

    async def fail_beside() -> None:
        async with beside(for_ever(ended)):
            await asyncio.sleep(0)
            raise TandemError("not back")

    with pytest.raises(TandemError, match="not back"):
        await fail_beside()
    assert ended == ["other work"]


@pytest.fixture
def as_in_a_terminal() -> Iterator[None]:
    """Whoever started the tests may ignore some of the signals, as `nohup` does."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("as_in_a_terminal")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_who_ends_it_ends_what_it_started(number: signal.Signals) -> None:
    ended: list[str] = []

    async def work() -> None:
        os.kill(os.getpid(), number)
        await for_ever(ended)

    with pytest.raises(KeyboardInterrupt):
        in_loop(work)
    assert ended == ["other work"]


@pytest.mark.usefixtures("as_in_a_terminal")
def test_a_signal_that_is_ignored_ends_nothing() -> None:
    async def work() -> str:
        os.kill(os.getpid(), signal.SIGHUP)
        await asyncio.sleep(0)
        return "done"

    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    assert in_loop(work) == "done"
