"""Serves POSTs that want the tokens of a prompt counted; nothing is generated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import orjson
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.types import Receive, Scope, Send

from router.http.bodies import Bodies
from router.http.exchange import check_encoding, ignored_header, send_body, send_error
from router.lifecycle.context import RouterContext
from router.openai.fields import PromptBounds
from router.openai.model_card import ModelCard
from router.openai.schema import ParsedRequest, parse_body
from router.openai.tokenize import token_ids
from tandem.core.config import LimitsConfig
from tandem.core.errors import TandemError

ReadPrompt = Callable[[dict[str, Any], LimitsConfig, PromptBounds], ParsedRequest]


class Counting:
    """Serves one endpoint, in Anthropic's shape."""

    def __init__(self, context: RouterContext, card: ModelCard, read_prompt: ReadPrompt, bodies: Bodies) -> None:
        self._context, self._card, self._read_prompt, self._bodies = context, card, read_prompt, bodies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            http = HttpRequest(scope, receive)
            check_encoding(http)
            parsed, num_tokens = await self._count(http)
        except ClientDisconnect:
            return
        except TandemError as error:
            await send_error(scope, send, error, self._context.errors)
            return
        await send_body(send, 200, orjson.dumps({"input_tokens": num_tokens}), ignored_header(parsed.ignored_fields))

    async def _count(self, http: HttpRequest) -> tuple[ParsedRequest, int]:
        limits = self._context.config.limits

        def work() -> tuple[ParsedRequest, int]:
            parsed = self._read_prompt(parse_body(raw), limits, PromptBounds(1, None))
            self._card.check_name(parsed.model)
            return parsed, sum(map(len, token_ids(parsed, self._context.tokenizer, self._card)))

        async with self._bodies.read(http) as raw:
            return await self._bodies.work_on(raw, work)
