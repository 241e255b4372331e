"""A worker that says nothing any more, as its session sees it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from router.workers import session as session_module
from router.workers.session import WorkerSession
from tandem.rpc.v1.common_pb2 import ROLE_DECODE
from tandem.rpc.v1.control_pb2 import Member
from tests.support.scripted_worker import ScriptedDecode
from tests.support.unheard import Unheard
from tests.support.waiting import until

LEASE_S = 0.5


@pytest.mark.long
async def test_a_silent_worker_gets_nothing_new_while_its_stream_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """That takes time; until it is done the session counts as open."""
    decode, took = ScriptedDecode("decode-0"), list[bool]()
    member = Member(
        worker_id="decode-0", incarnation="1", role=ROLE_DECODE, address=decode.info.address, state="ready"
    )
    session, make = WorkerSession(member, lease_s=LEASE_S, observer=Unheard()), session_module.make_channel

    @asynccontextmanager
    async def watched(address: str, *, is_near: bool) -> AsyncIterator[Any]:
        assert is_near, "tokens must not run ahead of what else it says"
        async with make(address, is_near=is_near) as channel:
            try:
                yield channel
            finally:
                took.append(session.takes_requests)

    monkeypatch.setattr(session_module, "make_channel", watched)
    session.start()
    try:
        await until(lambda: session.takes_requests, "the hello")
        decode.go_silent()
        await until(lambda: took, "the end of the stream")
        assert took == [False]
        decode.speak_again()
        await until(lambda: session.takes_requests, "the next hello")
    finally:
        session.close("the test ends")
        await session.wait_closed()
        await asyncio.to_thread(decode.kill)
