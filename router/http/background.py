"""Requests of batches, by the way that a body of HTTP goes: the same exchange, without a connection."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import orjson
from starlette.types import Message, Scope

from router.batches.run import Answer
from router.http.error_shapes import error_body_at, unforeseen
from router.http.exchange import IGNORED_FIELDS, Exchange
from router.lifecycle.request_errors import RequestErrors
from router.openai.endpoint import Call, ReadBody
from router.openai.fields import PromptBounds
from router.request.request import BACKGROUND_PRIORITY
from router.request.tenant import Tenant
from tandem.core.config import LimitsConfig
from tandem.core.errors import UnmeetableDeadlineError
from tandem.core.logging import bound

_log = logging.getLogger(__name__)


def behind_all(read_body: ReadBody) -> ReadBody:
    """Reads the same bodies; what they ask for comes after all that clients wait for."""

    def read(body: dict[str, Any], limits: LimitsConfig, bounds: PromptBounds) -> Call:
        call = read_body(body, limits, bounds)
        return replace(call, parsed=replace(call.parsed, priority=BACKGROUND_PRIORITY))

    return read


class Background:
    """Asks the endpoints that batches may use. `exchanges`: by path; `tenant_of`: an owner of batches."""

    def __init__(
        self, exchanges: Mapping[str, Exchange], tenant_of: Callable[[str], Tenant], errors: RequestErrors
    ) -> None:
        self._exchanges, self._tenant_of, self._errors = exchanges, tenant_of, errors

    async def ask(self, owner: str, path: str, body: bytes, request_id: str) -> Answer:
        """Cancelled, it ends the request. The tenant's limits a minute do not bound it: it takes what others leave."""
        tenant = replace(self._tenant_of(owner), requests_per_minute=0, tokens_per_minute=0)
        scope: Scope = {
            "type": "http", "method": "POST", "path": path, "headers": [], "query_string": b"",
            "state": {"request_id": request_id, "tenant": tenant},
        }  # fmt: skip
        has_read, status, parts = False, 0, list[bytes]()
        headers: dict[bytes, bytes] = {}

        async def receive() -> Message:
            nonlocal has_read
            if has_read:  # nobody goes away: who ends the request cancels this
                await asyncio.get_running_loop().create_future()
            has_read = True
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers.update(message["headers"])
            else:
                parts.append(message["body"])

        with bound(request_id=request_id):
            try:
                await self._exchanges[path](scope, receive, send)
            except Exception:  # noqa: BLE001 - the last border, as of HTTP: it is this line's, and no other one's
                _log.exception("unforeseen error in a line of a batch")
                error = unforeseen(request_id)
                self._errors.add(error, request_id)
                return Answer(error.http_status, orjson.dumps(error_body_at(path, error, request_id)))
        said = b"".join(parts)
        if status == 200:
            return Answer(status, said, ignored_fields=headers.get(IGNORED_FIELDS.encode(), b"").decode())
        told = orjson.loads(said)["error"]
        # A request whose time-out is too short has the same one the next time.
        is_retryable = bool(told["retryable"]) and told["code"] != UnmeetableDeadlineError.code
        return Answer(status, said, is_retryable, float(headers.get(b"retry-after", b"0")))
