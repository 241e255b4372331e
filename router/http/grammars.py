"""Whether the grammars that requests ask for can be followed: compiled beside the loop, and remembered."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from hashlib import sha256

from router.lifecycle.context import RouterContext
from router.openai.grammar import AskedGrammar, of_schema, parts_of
from router.openai.model_card import ModelCard
from tandem.core.errors import InvalidRequestError, OverloadedError
from tandem.core.grammar_compiler import compile_grammar
from tandem.core.tokenizer import Tokenizer
from tandem.core.vocabulary import Vocabulary

# Verdicts that are remembered; one takes a few hundred bytes.
_MAX_VERDICTS = 4096
# Grammars that are compiled or wait for it.
_MAX_WAITING = 32
_RETRY_AFTER_S = 1.0
# Parts of a schema that are tried to find the one that is meant.
_MAX_TRIES = 64


class GrammarCheck:
    """Checks of one router. It is used on the router's loop."""

    def __init__(self, context: RouterContext, card: ModelCard) -> None:
        """Makes the vocabulary, which holds up everything in the process: before the router serves."""
        self._limits = context.config.limits
        self._metrics = context.metrics
        self._vocabulary = _vocabulary(context.tokenizer, card)
        # By the digest of a grammar and the field that asked for it: why it is refused; empty: it is not.
        self._verdicts: OrderedDict[bytes, str] = OrderedDict()
        # By the same digest: verdicts that are being found, each for all who ask.
        self._tasks: dict[bytes, asyncio.Task[str]] = {}
        self._one_at_a_time = asyncio.Semaphore(1)

    async def check(self, asked: AskedGrammar) -> str:
        """The grammar as it travels, where it can be followed.

        Raises:
            InvalidRequestError: it cannot; names the field, and the part of a schema.
            OverloadedError: too many wait to be compiled.
        """
        digest = sha256(f"{asked.field}\n{asked.text}".encode()).digest()
        if (refusal := self._verdicts.get(digest)) is None:
            # Who goes away leaves the verdict to the others.
            refusal = await asyncio.shield(self._task(digest, asked))
        else:
            self._verdicts.move_to_end(digest)
        if refusal:
            self._metrics.grammars_refused.inc()
            raise InvalidRequestError(refusal, field=asked.field)
        if not asked.is_gbnf:
            return asked.text
        async with self._one_at_a_time:
            return (await asyncio.to_thread(asked.as_read, self._limits)).text

    def _task(self, digest: bytes, asked: AskedGrammar) -> asyncio.Task[str]:
        if (task := self._tasks.get(digest)) is not None:
            return task
        if len(self._tasks) >= _MAX_WAITING:
            raise OverloadedError("too many new grammars wait to be compiled", retry_after_s=_RETRY_AFTER_S)
        task = self._tasks[digest] = asyncio.create_task(self._compile(digest, asked), name="grammar")
        return task

    async def _compile(self, digest: bytes, asked: AskedGrammar) -> str:
        try:
            async with self._one_at_a_time:
                refusal = self._verdicts[digest] = await asyncio.to_thread(self._verdict, asked)
        finally:
            del self._tasks[digest]
        if len(self._verdicts) > _MAX_VERDICTS:
            self._verdicts.popitem(last=False)
        return refusal

    # -- beside the loop

    def _verdict(self, asked: AskedGrammar) -> str:
        began_s = time.monotonic()
        try:
            asked = asked.as_read(self._limits)
            said = self._refusal(asked)
            if not said:
                return ""
            path, said = self._meant(asked, said)
            return f"{path}: {said}"
        except InvalidRequestError as error:
            return error.message
        finally:
            self._metrics.grammar_compile_s.observe(time.monotonic() - began_s)

    def _refusal(self, asked: AskedGrammar) -> str:
        try:
            if isinstance(self._vocabulary, InvalidRequestError):
                raise self._vocabulary
            compile_grammar(asked.text, self._vocabulary.tokens).try_out()
        except InvalidRequestError as error:
            return error.message
        return ""

    def _meant(self, asked: AskedGrammar, said: str) -> tuple[str, str]:
        """The path of the innermost part of a schema of which alone the same is said."""
        path, schema, num_left = asked.field, asked.schema, _MAX_TRIES
        shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema} if schema else {}
        found = True
        while found:
            found = False
            for step, part in parts_of(schema):
                if num_left == 0:
                    return path, said
                num_left -= 1
                alone = of_schema({**shared, **part} if isinstance(part, dict) else part, path, self._limits)
                if self._refusal(alone) == said:
                    path, schema, found = f"{path}{step}", part, True
                    break
        return path, said


def _vocabulary(tokenizer: Tokenizer, card: ModelCard) -> Vocabulary | InvalidRequestError:
    """Or why no grammar holds with the model."""
    try:
        return Vocabulary(tokenizer, card.eos_token_ids, card.vocab_size)
    except InvalidRequestError as error:
        return error
