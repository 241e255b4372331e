"""Tells other routers that share the port of this one's turns, and hears of theirs (`router.policy.other_turns`)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import astuple

import orjson

from router.http.siblings import Siblings
from router.lifecycle.turns import Turns
from router.policy.other_turns import EVERY_S, Next, TurnNews
from router.policy.turns import Served

_log = logging.getLogger(__name__)

_TOLD = b"t"
"""Before the word of one router to another: a question whose answer says nothing."""
_PAUSE_S = 5.0
"""So long nothing is told to a router that did not answer: the others would have to wait for it each time."""


class TurnExchange:
    """Of one router.

    Attributes:
        siblings: routers that share the port; `None` where there are none, or none is known yet.
    """

    def __init__(self, turns: Turns, name: str, num_routers: Callable[[], int]) -> None:
        """`num_routers`: how many there are now, this one included."""
        self.siblings: Siblings | None = None
        self._turns, self._name, self._num_routers = turns, name, num_routers
        self._silent_until_s: dict[str, float] = {}  # by name
        self._has_news = asyncio.Event()
        turns.on_news = self._has_news.set

    async def run(self) -> None:
        """Until it is cancelled. Idle it does nothing."""
        while True:
            if not self._turns.num_waiting:  # else others may not be heard any more, whose turns were waited for
                await self._has_news.wait()
            self._has_news.clear()
            num_others = self._num_routers() - 1
            if self.siblings is not None and num_others > 0:
                await self._tell(self.siblings)
            self._turns.look()  # also where the last other one has gone: what it said may hold nobody any more
            await asyncio.sleep(EVERY_S * max(1, num_others))

    async def _tell(self, siblings: Siblings) -> None:
        now_s = asyncio.get_running_loop().time()
        silent = {name: until_s for name, until_s in self._silent_until_s.items() if now_s < until_s}
        try:
            told = await siblings.ask(_TOLD + encoded(self._name, self._turns.tell()), silent.keys())
        except OSError as error:  # such as no descriptor is free: requests are served all the same
            _log.warning("other routers hear nothing of the turns here: %s", error)
            return
        new = [name for name, answer in told.items() if answer is None]
        self._silent_until_s = silent | dict.fromkeys(new, now_s + _PAUSE_S)

    def answer(self, question: bytes) -> bytes:
        """What another router asks; empty where this is no question of this kind."""
        if question[:1] != _TOLD:
            return b""
        self._turns.hear(*decoded(question[1:]))
        return _TOLD


def encoded(name: str, news: TurnNews) -> bytes:
    """At most some 12 KiB. `name`: of the router that tells."""
    first = astuple(news.next) if news.next is not None else None
    served = {owner: (each.counter, each.given) for owner, each in news.served.items()}
    return orjson.dumps([name, news.life, news.number, news.last, first, served])


def decoded(text: bytes) -> tuple[str, TurnNews]:
    """Name and word of a router."""
    name, life, number, last, first, served = orjson.loads(text)
    news = {owner: Served(*figures) for owner, figures in served.items()}
    return name, TurnNews(life, number, last, Next(*first) if first is not None else None, news)
