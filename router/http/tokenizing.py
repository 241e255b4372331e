"""Serves `/tokenize` and `/detokenize`: no worker takes part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import orjson
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from router.http.bodies import Bodies
from router.http.exchange import check_encoding, ignored_header
from router.lifecycle.context import RouterContext
from router.openai.model_card import ModelCard
from router.openai.schema import parse_body
from router.openai.tokenizing import detokenized, tokenized
from tandem.core.errors import CancelledError


class Tokenizing:
    """Both endpoints of one router."""

    def __init__(self, context: RouterContext, card: ModelCard, bodies: Bodies) -> None:
        self._context = context
        self._card = card
        self._bodies = bodies

    async def tokenize(self, http: Request) -> Response:
        max_context = self._card.context_within(self._context.workers.max_context())

        def answer(body: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
            return tokenized(
                body,
                self._context.config.limits,
                tokenizer=self._context.tokenizer,
                card=self._card,
                max_context=max_context,
            )

        return await self._answered(http, answer)

    async def detokenize(self, http: Request) -> Response:
        def answer(body: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
            limits = self._context.config.limits
            return detokenized(body, limits, tokenizer=self._context.tokenizer, card=self._card)

        return await self._answered(http, answer)

    async def _answered(
        self, http: Request, answer: Callable[[dict[str, Any]], tuple[dict[str, Any], list[str]]]
    ) -> Response:
        check_encoding(http)

        def content(raw: bytes) -> tuple[bytes, list[str]]:
            said, ignored = answer(parse_body(raw))
            return orjson.dumps(said), ignored

        try:
            async with self._bodies.read(http) as raw:
                said, ignored = await self._bodies.work_on(raw, lambda: content(raw))
        except ClientDisconnect as error:
            raise CancelledError("the client went away") from error
        return self._bodies.answer(http, said, ignored_header(ignored))
