"""Whether the grammars that requests ask for can be followed: tried beside the loop, and remembered."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import dataclass, field
from hashlib import sha256

from router.http.grammar_queue import GrammarQueue
from router.http.grammar_trials import GrammarTrials, TrialEnd
from router.lifecycle.context import RouterContext
from router.openai.grammar import AskedGrammar, of_schema, parts_of
from router.openai.model_card import ModelCard
from tandem.core.errors import CancelledError, InvalidRequestError, OverloadedError, TandemError
from tandem.core.recent import Recent, RecentByCost
from tandem.core.tokenizer import Tokenizer
from tandem.core.vocabulary import Vocabulary, description

# Verdicts that are remembered, and the characters of grammars beside them that were read from GBNF.
_MAX_VERDICTS = 4096
_MAX_CHARS = 4 << 20
# Kept apart, so many on grammars that take so long to be compiled. A worker compiles each again that it does not keep:
# it shall have none that has not waited here for its client's turn.
_COSTLY_S = 0.05
_MAX_COSTLY = 32
# Grammars that are tried at once, and that are tried or wait for it: of one client, of all.
_NUM_AT_ONCE = 2
_MAX_OF_ONE = 16
_MAX_WAITING = 64
_RETRY_AFTER_S = 1.0
# Parts of a schema that are tried to find the one that is meant, and what they may take of a processor.
_MAX_TRIES = 64
_MAX_SEARCH_S = 1.0


@dataclass(frozen=True, slots=True)
class Found:
    """What came of a grammar.

    Attributes:
        text: of one that was read from GBNF, as it travels; else empty.
        refusal: why it is refused; empty: it is not.
        cpu_s: what its trial took of a processor.
    """

    text: str
    refusal: str
    cpu_s: float

    @property
    def is_costly(self) -> bool:
        return not self.refusal and self.cpu_s >= _COSTLY_S


@dataclass(slots=True)
class _Asked:
    """A grammar that is tried, or waits for it.

    Attributes:
        askers: who waits for what comes of it, and for how many requests.
        found: what comes of it, for all of them.
        end: of its trial.
    """

    grammar: AskedGrammar
    found: asyncio.Future[Found]
    askers: Counter[str] = field(default_factory=Counter)
    end: TrialEnd = field(default_factory=TrialEnd)


class GrammarCheck:
    """Checks of one router. It is used on the router's loop."""

    def __init__(self, context: RouterContext, card: ModelCard) -> None:
        """Makes the vocabulary, which holds up everything in the process: before the router serves."""
        self._limits = context.config.limits
        self._metrics = context.metrics
        self._trials = _trials(context.tokenizer, card, self._limits.max_grammar_compile_s)
        self._remembered = remembered_grammars()
        self._queue = GrammarQueue(_NUM_AT_ONCE, _MAX_OF_ONE, _MAX_WAITING)
        # All and only grammars that are tried or wait for it.
        self._asked: dict[bytes, _Asked] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def close(self) -> None:
        """End the process in which grammars are tried. From any thread."""
        if isinstance(self._trials, GrammarTrials):
            self._trials.close()

    def remembered(self, asked: AskedGrammar) -> str | None:
        """As `check`, where what came of it is remembered; else `None`."""
        found = self._remembered.get(_digest(asked))
        return None if found is None else self._as_travels(asked, found)

    async def check(self, asked: AskedGrammar, client: str) -> str:
        """The grammar as it travels, where it can be followed. Who is cancelled gives up its place, and what nobody
        else waits for is not tried any further.

        Args:
            client: who asks. Clients take turns.

        Raises:
            InvalidRequestError: it cannot; names the field, and the part of a schema.
            OverloadedError: too many wait to be compiled.
            InternalError: it could not be tried.
        """
        digest = _digest(asked)
        if (found := self._remembered.get(digest)) is None:
            found = await self._await_found(digest, asked, client)
        return self._as_travels(asked, found)

    def _as_travels(self, asked: AskedGrammar, found: Found) -> str:
        if found.refusal:
            self._metrics.grammars_refused.inc()
            raise InvalidRequestError(found.refusal, field=asked.field)
        return found.text or asked.text

    async def _await_found(self, digest: bytes, grammar: AskedGrammar, client: str) -> Found:
        if not self._queue.enter(client, digest):
            raise _too_many()
        if (asked := self._asked.get(digest)) is None:
            asked = self._asked[digest] = _Asked(grammar, asyncio.get_running_loop().create_future())
        asked.askers[client] += 1
        self._begin()
        try:
            return await asyncio.shield(asked.found)
        except asyncio.CancelledError:
            self._leave(digest, asked, client)
            raise

    def _leave(self, digest: bytes, asked: _Asked, client: str) -> None:
        """One asker goes away."""
        asked.askers[client] -= 1
        asked.askers = +asked.askers
        if asked.found.done() or client in asked.askers:
            return
        self._queue.leave(client, digest, is_wanted=bool(asked.askers))
        if not asked.askers:
            asked.end.end()
            if not self._queue.is_running(digest):
                del self._asked[digest]
        elif not self._queue.will_be_tried(digest):  # only the line of who goes had it
            if self._enters(digest, asked):
                self._begin()
            else:
                del self._asked[digest]
                asked.found.set_exception(_too_many())

    def _enters(self, digest: bytes, asked: _Asked) -> bool:
        """Let it wait at the turns of all who ask for it; `False`: of none, since too many wait."""
        entered = [self._queue.enter(client, digest) for client in asked.askers]
        return any(entered)

    def _begin(self) -> None:
        while (turn := self._queue.begin()) is not None:
            task = asyncio.create_task(self._try(*turn), name="grammar")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _try(self, client: str, digest: bytes) -> None:
        asked = self._asked[digest]
        try:
            found = await asyncio.to_thread(self._found, asked.grammar, asked.end)
        except Exception as error:  # noqa: BLE001 - it goes to whoever asked
            self._end(client, digest, asked, error)
        else:
            self._remembered.put(digest, found, is_costly=found.is_costly)
            self._end(client, digest, asked, found)

    def _end(self, client: str, digest: bytes, asked: _Asked, found: Found | Exception) -> None:
        """A trial has ended, with a verdict or without."""
        self._queue.end(client)
        has_new = isinstance(found, CancelledError) and bool(asked.askers)  # they have come since it was given up
        if has_new and self._enters(digest, asked):
            asked.end = TrialEnd()
        else:
            found = _too_many() if has_new else found
            del self._asked[digest]
            if isinstance(found, Found):
                asked.found.set_result(found)
            else:
                asked.found.set_exception(found)
                asked.found.exception()  # who asked may be gone
        self._begin()

    # -- beside the loop

    def _found(self, asked: AskedGrammar, end: TrialEnd) -> Found:
        began_s = time.monotonic()
        try:
            read = asked.as_read(self._limits)
            said, cpu_s = self._said(read, end)
            if said:
                path, said = self._meant(read, said, end)
                said = f"{path}: {said}"
            return Found(read.text if asked.is_gbnf else "", said, cpu_s)
        except InvalidRequestError as error:
            return Found("", error.message, 0.0)
        finally:
            self._metrics.grammar_compile_s.observe(time.monotonic() - began_s)

    def _said(self, asked: AskedGrammar, end: TrialEnd) -> tuple[str, float]:
        """Why it is refused, or nothing; and the seconds that this took of a processor."""
        if isinstance(self._trials, TandemError):
            return self._trials.message, 0.0
        verdict = self._trials.try_out(asked.text, end)
        return verdict.refusal, verdict.cpu_s

    def _meant(self, asked: AskedGrammar, said: str, end: TrialEnd) -> tuple[str, str]:
        """The path of the innermost part of a schema of which alone the same is said."""
        path, schema, num_left, left_s = asked.field, asked.schema, _MAX_TRIES, _MAX_SEARCH_S
        shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema} if schema else {}
        found = True
        while found:
            found = False
            for step, part in parts_of(schema):
                if num_left == 0 or left_s <= 0:
                    return path, said
                num_left -= 1
                alone = of_schema({**shared, **part} if isinstance(part, dict) else part, path, self._limits)
                said_of_part, cpu_s = self._said(alone, end)
                left_s -= cpu_s
                if said_of_part == said:
                    path, schema, found = f"{path}{step}", part, True
                    break
        return path, said


def _digest(asked: AskedGrammar) -> bytes:
    return sha256(f"{asked.field}\n{asked.text}".encode()).digest()


def _too_many() -> OverloadedError:
    return OverloadedError("too many new grammars wait to be compiled", retry_after_s=_RETRY_AFTER_S)


def remembered_grammars() -> RecentByCost[bytes, Found]:
    """What came of grammars, by their digests."""

    def kept(most: int) -> Recent[bytes, Found]:
        return Recent(most, _MAX_CHARS, lambda _, found: len(found.text))

    return RecentByCost(kept(_MAX_COSTLY), kept(_MAX_VERDICTS))


def _trials(tokenizer: Tokenizer, card: ModelCard, max_s: float) -> GrammarTrials | TandemError:
    """Of grammars; or why none holds with the model."""
    try:
        made_of = description(tokenizer, card.eos_token_ids, card.vocab_size)
        Vocabulary(tokenizer, card.eos_token_ids, card.vocab_size, made_of)
    except InvalidRequestError as error:
        return error
    return GrammarTrials(made_of, max_s)
