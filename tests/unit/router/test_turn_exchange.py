"""Routers of a host tell each other of their turns, by real sockets."""

from __future__ import annotations

import asyncio
import math
import socket
from collections.abc import Callable, Collection
from contextlib import ExitStack, closing
from pathlib import Path

from router.http.siblings import Siblings
from router.http.turn_exchange import TurnExchange
from router.lifecycle.turns import Turns
from router.policy.gate import Room
from router.policy.other_turns import FRESH_S, Next, TurnNews
from router.policy.turns import Served
from router.request.mailbox import Mailbox
from router.request.request import Request
from router.request.targets import Targets
from tandem.core.clock import MonotonicClock
from tandem.core.sampling import SamplingParams
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


def meet(stack: ExitStack, directory: Path, name: str, answer: Callable[[bytes], bytes]) -> Siblings:
    """A router whose questions are answered in the event loop, as in a router's process."""
    loop = asyncio.get_running_loop()

    async def own(question: bytes) -> bytes:
        return answer(question)

    def ask(question: bytes) -> bytes:
        return asyncio.run_coroutine_threadsafe(own(question), loop).result(10)

    siblings = stack.enter_context(closing(Siblings(directory, name, ask)))
    listener, _ = siblings.take_listener(lambda: socket.create_server(("127.0.0.1", 0)))
    stack.enter_context(listener)
    return siblings


def request(prompt: tuple[int, ...] = (1, 2, 3)) -> Request:
    return Request("a", prompt, SamplingParams(), 0.0, targets=Targets(1.0, 0.1))


async def test_who_waits_for_a_router_that_has_gone_is_looked_at_when_its_word_holds_no_more() -> None:
    """Nothing else happens meanwhile."""
    turns = make_turns()
    turns.join(request(), Mailbox()).end()
    owner = request().tenant.owner
    turns.hear("router-1", TurnNews("a life", 1, 0.0, Next("other", 0, 0.0), {owner: Served(1e6, 0.0)}))
    telling = asyncio.create_task(TurnExchange(turns, "router-0", lambda: 1).run())
    turn = turns.join(request(), Mailbox())
    assert not turn.has_come
    await until(lambda: turn.has_come, "its turn", FRESH_S + 10)
    telling.cancel()
    await asyncio.wait({telling})


class Unable(Siblings):
    """Cannot ask at first; `has_asked` is set when it could."""

    def __init__(self) -> None:
        self.num_asked, self.has_asked = 0, asyncio.Event()

    async def ask(self, question: bytes, but: Collection[str] = ()) -> dict[str, bytes | None]:
        self.num_asked += 1
        if self.num_asked == 1:
            raise OSError(24, "Too many open files")
        self.has_asked.set()
        return {}


async def test_a_router_that_cannot_ask_others_tells_them_later() -> None:
    turns = make_turns()
    exchange = TurnExchange(turns, "router-0", lambda: 2)
    exchange.siblings = siblings = Unable()
    telling = asyncio.create_task(exchange.run())
    turn = turns.join(request(), Mailbox())
    while not siblings.has_asked.is_set():
        assert not telling.done(), "a router whose exchange of turns ends is closed"
        turn.charge(1)
        await asyncio.sleep(0.01)
    telling.cancel()
    await asyncio.wait({telling})


async def test_what_a_router_gives_is_heard_by_the_others_and_one_that_does_not_answer_is_left_out(
    tmp_path: Path,
) -> None:
    speaking, hearing, num_asked = make_turns(), Hearing(4), 0

    def unable(_: bytes) -> bytes:
        nonlocal num_asked
        num_asked += 1
        raise TimeoutError

    exchange = TurnExchange(speaking, "router-0", lambda: 3)
    with ExitStack() as stack:
        exchange.siblings = meet(stack, tmp_path / "siblings", "router-0", exchange.answer)
        meet(stack, tmp_path / "siblings", "router-1", TurnExchange(hearing, "router-1", lambda: 3).answer)
        meet(stack, tmp_path / "siblings", "router-2", unable)
        telling = asyncio.create_task(exchange.run())
        turn = speaking.join(Request("a", (1, 2, 3), SamplingParams(), 0.0, targets=Targets(1.0, 0.1)), Mailbox())

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
