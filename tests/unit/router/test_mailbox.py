"""A reader that is spared waking up: what it is offered at once, and that nothing is lost, doubled or overtaken."""

from __future__ import annotations

import asyncio

import pytest

from router.lifecycle.delta_buffer import DeltaBuffer
from router.request.mailbox import Mailbox
from router.request.request import Delta, TokenGiven
from tandem.core.errors import CancelledError


def delta(number: int) -> Delta:
    return Delta(0, f"{number} ", [TokenGiven(1, 0, number, number)], None)


async def test_an_item_is_dealt_with_at_once_only_while_the_reader_waits_and_nothing_is_before_it() -> None:
    box, dealt = Mailbox[int](), list[int]()

    def take_even(item: int) -> bool:
        if item % 2 == 0:
            dealt.append(item)
        return item % 2 == 0

    box.at_once = take_even
    box.put(0)  # nobody waits
    assert await box.take() == [0]
    reader = asyncio.create_task(box.take())
    await asyncio.sleep(0)
    for item in (2, 4, 5, 6):  # 5 wakes the reader up, and 6 is behind it
        box.put(item)
    assert dealt == [2, 4]
    assert await reader == [5, 6]


async def test_what_dealing_at_once_raises_is_raised_where_the_reader_waits() -> None:
    box = Mailbox[int]()

    def fail(item: int) -> bool:
        raise CancelledError(f"no {item}")

    box.at_once = fail
    reader = asyncio.create_task(box.take())
    await asyncio.sleep(0)
    box.put(1)
    with pytest.raises(CancelledError, match="no 1"):
        await reader


async def test_all_deltas_of_a_round_are_one_write_and_those_that_cannot_be_written_are_the_writers() -> None:
    buffer, written, may_write = DeltaBuffer(max_tokens=None), list[list[int]](), True

    def write(items: object) -> bool:
        if may_write:
            written.append([each.tokens[0].token_id for _, each in items])  # type: ignore[attr-defined]
        return may_write

    buffer.write_now = write
    writer = asyncio.create_task(buffer.take())
    await asyncio.sleep(0)
    buffer.put((0, delta(1)))
    buffer.put((0, delta(2)))
    assert not written
    await asyncio.sleep(0)
    buffer.put((0, delta(3)))
    await asyncio.sleep(0)
    assert written == [[1, 2], [3]]
    may_write = False
    buffer.put((0, delta(4)))
    await asyncio.sleep(0)
    buffer.put((0, delta(5)))
    assert [each.tokens[0].token_id for _, each in await writer] == [4, 5]
    assert written == [[1, 2], [3]]


async def test_the_end_leaves_the_writer_what_came_before_it() -> None:
    buffer = DeltaBuffer(max_tokens=None)
    buffer.write_now = lambda items: pytest.fail("the writer was woken up")
    writer = asyncio.create_task(buffer.take())
    await asyncio.sleep(0)
    buffer.put((0, delta(1)))
    buffer.close()
    assert len(await writer) == 1
    assert await buffer.take() == []


async def test_a_writer_that_is_blocked_is_cut_off_though_it_wrote_at_once_before() -> None:
    buffer, overflowed = DeltaBuffer(max_tokens=2), list[bool]()
    buffer.write_now = lambda items: True
    buffer.on_overflow = lambda: overflowed.append(True)
    buffer.put((0, delta(1)))
    buffer.put((0, delta(2)))
    with pytest.raises(CancelledError, match="too slowly"):
        buffer.put((0, delta(3)))
    assert overflowed == [True]
