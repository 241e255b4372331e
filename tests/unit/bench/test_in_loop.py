"""What measurements run in: work beside a block, and the end of both."""

from __future__ import annotations

import asyncio
import os
import signal

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


def test_sigterm_cancels_what_runs_so_that_it_ends_what_it_started() -> None:
    ended: list[str] = []

    async def work() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        await for_ever(ended)

    with pytest.raises(asyncio.CancelledError):
        in_loop(work)
    assert ended == ["other work"]
