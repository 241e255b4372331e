"""Tells the other routers of the cluster of this one's turns, and hears of theirs (`router.policy.other_turns`)."""

from __future__ import annotations

import asyncio
from dataclasses import astuple

import orjson

from router.lifecycle.turns import Turns
from router.policy.other_turns import EVERY_S, Next, TurnNews
from router.policy.turns import Served
from router.workers.other_routers import OtherRouters

_KIND = "turns"
"""Of the word of one router to another: a question whose answer says nothing."""
_HEARD = b"heard"
_PAUSE_S = 5.0
"""So long nothing is told to a router that did not answer: the others would have to wait for it each time."""


class TurnExchange:
    """Of one router."""

    def __init__(self, turns: Turns, name: str, others: OtherRouters) -> None:
        self._turns, self._name, self._others = turns, name, others
        self._silent_until_s: dict[str, float] = {}  # by name
        self._has_news = asyncio.Event()
        turns.on_news = self._has_news.set
        others.on_question(_KIND, self._hear)

    async def run(self) -> None:
        """Until it is cancelled. Idle it does nothing."""
        while True:
            if not self._turns.num_waiting:  # else others may not be heard any more, whose turns were waited for
                await self._has_news.wait()
            self._has_news.clear()
            if self._others:
                await self._tell()
            self._turns.look()  # also where the last other one has gone: what it said may hold nobody any more
            await asyncio.sleep(EVERY_S * max(1, len(self._others)))

    async def _tell(self) -> None:
        now_s = asyncio.get_running_loop().time()
        silent = {name: until_s for name, until_s in self._silent_until_s.items() if now_s < until_s}
        told = await self._others.ask(_KIND, encoded(self._name, self._turns.tell()), but=silent.keys())
        new = [name for name, answer in told.items() if answer is None]
        self._silent_until_s = silent | dict.fromkeys(new, now_s + _PAUSE_S)

    def _hear(self, word: bytes) -> bytes:
        self._turns.hear(*decoded(word))
        return _HEARD


def encoded(name: str, news: TurnNews) -> bytes:
    """At most some 12 KiB. `name`: of the router that tells."""
    first = astuple(news.next) if news.next is not None else None
    served = {owner: (each.counter, each.given) for owner, each in news.served.items()}
    return orjson.dumps([name, news.life, news.number, news.last, first, served])


def decoded(text: bytes) -> tuple[str, TurnNews]:
    """Name and word of a router. Raises `ValueError` for what is no word."""
    try:
        name, life, number, last, first, served = orjson.loads(text)
        news = {owner: Served(*figures) for owner, figures in served.items()}
        return name, TurnNews(life, number, last, Next(*first) if first is not None else None, news)
    except (TypeError, AttributeError) as error:
        raise ValueError(f"no word of turns: {error}") from error
