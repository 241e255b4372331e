"""Who waits for a grammar that is tried, and what comes of it, where those who asked before them go away."""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict
from types import SimpleNamespace
from typing import Any, cast

import pytest

from router.http import grammars
from router.http.grammar_trials import TrialEnd, Verdict
from router.http.grammars import GrammarCheck
from router.openai.grammar import AskedGrammar
from tandem.core.config import Config
from tandem.core.metrics import RouterMetrics
from tests.support.waiting import LONG_S, until


class Gates:
    """Trials that end when their gate is opened."""

    def __init__(self) -> None:
        self.open: defaultdict[str, threading.Event] = defaultdict(threading.Event)

    def try_out(self, text: str, end: TrialEnd) -> Verdict:
        assert self.open[text].wait(LONG_S)
        end.check()
        return Verdict("", 0.0)


def asked(name: str) -> AskedGrammar:
    return cast(AskedGrammar, SimpleNamespace(field="grammar", text=name, is_gbnf=False, as_read=lambda _: asked(name)))


async def test_who_asks_for_what_was_given_up_is_answered_whoever_else_goes_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gates = Gates()
    monkeypatch.setattr(grammars, "_trials", lambda *_: gates)
    context: Any = SimpleNamespace(config=Config(), metrics=RouterMetrics(), tokenizer=None)
    check = GrammarCheck(context, cast(Any, None))

    async def settle() -> None:
        for _ in range(20):
            await asyncio.sleep(0)

    def ask(name: str, client: str) -> asyncio.Task[str]:
        return asyncio.create_task(check.check(asked(name), client))

    first = ask("x", "a")
    await settle()
    first.cancel()  # nobody waits: its trial is being ended
    await settle()
    second, third = ask("x", "b"), ask("x", "c")
    others = [ask(name, name) for name in ("o1", "o2", "o3")]  # which have all places when that ends
    await settle()
    gates.open["x"].set()
    await until(lambda: not check._queue.is_running(next(iter(check._asked))), "the end of the trial")
    second.cancel()
    await settle()
    for name in ("o1", "o2", "o3"):
        gates.open[name].set()
    async with asyncio.timeout(LONG_S):
        assert await third == "x"
        await asyncio.gather(*others)
    assert not check._asked
