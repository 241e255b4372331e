"""Routers tell each other of their turns, by their real control services."""

from __future__ import annotations

import asyncio
import math
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from router.control import RouterControl, serve_control
from router.http.turn_exchange import TurnExchange, encoded
from router.lifecycle.turns import Turns
from router.policy.gate import Room
from router.policy.other_turns import FRESH_S, Next, TurnNews
from router.policy.turns import Served
from router.request.mailbox import Mailbox
from router.request.request import Request
from router.request.targets import Targets
from router.workers.other_routers import OtherRouters
from tandem.core.clock import MonotonicClock
from tandem.core.sampling import SamplingParams
from tandem.rpc.guard import RoleGuard
from tandem.rpc.v1.control_pb2 import OtherRouter
from tests.support.waiting import until

ROOM = Room(num_computing=1, tokens_per_s=math.inf, num_decode=1, num_places=8, most_pages=99, page_size=16)


def make_turns() -> Turns:
    return Turns(lambda: ROOM, 10.0, MonotonicClock())


class Hearing(Turns):
    """Notes what it hears; `enough` is set when it has heard so many words."""

    def __init__(self, num: int) -> None:
        super().__init__(lambda: ROOM, 10.0, MonotonicClock())
        self.heard: list[tuple[str, TurnNews]] = []
        self.enough, self._num = asyncio.Event(), num

    def hear(self, router: str, news: TurnNews) -> None:
        super().hear(router, news)
        self.heard.append((router, news))
        if len(self.heard) >= self._num:
            self.enough.set()


def unused(*_: object) -> Any:
    raise AssertionError("no supervisor speaks to these")


@asynccontextmanager
async def meet(*names: str) -> AsyncIterator[list[OtherRouters]]:
    """Routers that answer each other by their control services."""
    each, servers, addresses = [OtherRouters() for _ in names], [], []
    for others in each:
        control = RouterControl(None, others, unused, unused, unused)  # type: ignore[arg-type]
        server, port = await serve_control(control, RoleGuard(), "127.0.0.1", 0)
        servers.append(server)
        addresses.append(f"127.0.0.1:{port}")
    everyone = [
        OtherRouter(name=name, control_address=address) for name, address in zip(names, addresses, strict=True)
    ]
    for others, own in zip(each, everyone, strict=True):
        others.apply(other for other in everyone if other is not own)
    try:
        yield each
    finally:
        for others in each:
            await others.close()
        for server in servers:
            await server.stop(0)


def request(prompt: tuple[int, ...] = (1, 2, 3)) -> Request:
    return Request("a", prompt, SamplingParams(), 0.0, targets=Targets(1.0, 0.1))


@pytest.mark.long
async def test_who_waits_for_a_router_that_has_gone_is_looked_at_when_its_word_holds_no_more() -> None:
    """Nothing else happens meanwhile."""
    turns = make_turns()
    turns.join(request(), Mailbox()).end()
    owner = request().tenant.owner
    turns.hear("router-1", TurnNews("a life", 1, 0.0, Next("other", 0, 0.0), {owner: Served(1e6, 0.0)}))
    telling = asyncio.create_task(TurnExchange(turns, "router-0", OtherRouters()).run())
    turn = turns.join(request(), Mailbox())
    assert not turn.has_come
    await until(lambda: turn.has_come, "its turn", FRESH_S + 10)
    telling.cancel()
    await asyncio.wait({telling})


@pytest.mark.long
async def test_what_a_router_gives_is_heard_by_the_others_and_one_that_does_not_answer_is_left_out() -> None:
    speaking, hearing, num_asked = make_turns(), Hearing(4), 0

    def unable(_: bytes) -> bytes:
        nonlocal num_asked
        num_asked += 1
        raise ValueError

    async with meet("router-0", "router-1", "router-2") as (first, second, third):
        exchange = TurnExchange(speaking, "router-0", first)
        TurnExchange(hearing, "router-1", second)
        third.on_question("turns", unable)
        telling = asyncio.create_task(exchange.run())
        turn = speaking.join(request(), Mailbox())

        async def give() -> None:
            while not hearing.enough.is_set():
                turn.charge(5)
                await asyncio.sleep(0)

        async with asyncio.timeout(20):
            await asyncio.gather(give(), hearing.enough.wait())
        telling.cancel()
        await asyncio.wait({telling})
    name, last = hearing.heard[-1]
    assert name == "router-0"
    (served,) = last.served.values()
    assert served.given >= 8
    assert num_asked == 1


@pytest.mark.long
async def test_a_router_that_is_forgotten_while_it_is_asked_ends_nobody_s_task() -> None:
    """The router would close: it cannot tell turns any more."""
    others = OtherRouters()
    with socket.create_server(("127.0.0.1", 0)) as silent:  # it takes connections and says nothing
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        others.apply([OtherRouter(name="router-1", control_address=address)])
        asking = asyncio.create_task(others.ask("turns", b""))
        others.apply([])
        assert await asking == {}, "it was forgotten before"
        others.apply([OtherRouter(name="router-1", control_address=address)])
        asking = asyncio.create_task(others.ask("turns", b""))
        await asyncio.sleep(0)
        others.apply([])
        assert await asking == {"router-1": None}
    await others.close()


@pytest.mark.parametrize("word", [b"", b"{}", b"[1]", b'["a",1,2,3,[1],{}]', b'["a","l",1,0.0,null,{"x":3}]'])
async def test_what_is_no_word_is_refused_and_changes_nothing(word: bytes) -> None:
    async with meet("router-0", "router-1") as (first, second):
        TurnExchange(hearing := Hearing(1), "router-1", second)
        assert await first.ask("turns", word) == {"router-1": None}
        assert not hearing.heard
        told = TurnNews("a life", 1, 0.0, None, {})
        assert await first.ask("turns", encoded("router-0", told)) == {"router-1": b"heard"}
        assert hearing.heard == [("router-0", told)]
