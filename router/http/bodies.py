"""The bodies of requests and answers: how many bytes are held at a time, and where the large ones are worked on.

What a body holds is its sender's choice, and eight megabytes of it take seconds to check and to tokenise. So the loop
that serves everybody's tokens works on small ones only; the others are worked on in threads, few at a time, since
threads share the interpreter with the loop. The same holds for answers that show a lot beside their text.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from router.http.clients import Shared, client_of
from tandem.core.errors import OverloadedError, RequestTooLargeError

Result = TypeVar("Result")

#: Bodies larger than this are worked on beside the loop. So much of each counts against no budget: whoever sends small
#: ones is served whatever others send. A connection has one body at a time, so beside the budget they hold no more than
#: this times `limits.max_connections` (32 MiB at first), and the lines of batches that are under way as much each.
_SMALL_BYTES = 8 << 10
_MAX_AT_ONCE = 2
#: Answers with more log-probabilities and token ids than this are made beside the loop.
_SMALL_ENTRIES = 2048
#: All bodies together, in largest ones: of those that arrive, wait for a thread, or are in one. One client's, a half.
_BUDGET_BODIES = 8
_RETRY_AFTER_S = 1.0


class Bodies:
    """All bodies that one router holds. Its methods run on the router's loop."""

    def __init__(self, max_bytes: int) -> None:
        """`max_bytes`: of one body."""
        self._max_bytes = max_bytes
        self._budget = Shared(_BUDGET_BODIES * max_bytes)
        self._threads = asyncio.Semaphore(_MAX_AT_ONCE)
        self._answer_threads = asyncio.Semaphore(_MAX_AT_ONCE)

    @asynccontextmanager
    async def read(self, request: Request) -> AsyncIterator[bytes]:
        """The whole body of `request`. Its bytes count against the budget, and its client's part, until the block ends.

        Raises:
            RequestTooLargeError: it is larger than one may be.
            OverloadedError: all bodies together are larger than the budget, or those of this client than its part.
            ClientDisconnect: the client went away.
        """
        client = client_of(request.scope, request.scope["state"]["tenant"])
        body, held = bytearray(), 0
        try:
            async for part in request.stream():
                size = len(body) + len(part)
                if size > self._max_bytes:
                    raise RequestTooLargeError(
                        f"the body is larger than {self._max_bytes} bytes (limits.max_body_bytes)"
                    )
                more = max(0, size - _SMALL_BYTES) - held
                if not self._budget.take(client, more):
                    raise OverloadedError("too many large bodies arrive at once", retry_after_s=_RETRY_AFTER_S)
                held += more
                body += part
            yield bytes(body)
        finally:
            self._budget.give_back(client, held)

    def answer(self, request: Request, content: bytes, headers: dict[str, str]) -> Response:
        """JSON whose size its sender chose. Its bytes count against the budget until the client has read them, but for
        what the kernel holds.

        Raises:
            RequestTooLargeError: it is larger than what all answers of one client may be.
            OverloadedError: all bodies and answers together are larger than the budget, or those of this client than
                its part.
        """
        client = client_of(request.scope, request.scope["state"]["tenant"])
        held, most = max(0, len(content) - _SMALL_BYTES), self._budget.most_of_one
        if held > most:
            raise RequestTooLargeError(
                f"the answer has {len(content)} bytes, and at most {most} are given; ask for less at once"
            )
        if not self._budget.take(client, held):
            raise OverloadedError("too many large answers are read at once", retry_after_s=_RETRY_AFTER_S)
        return _HeldAnswer(content, headers, lambda: self._budget.give_back(client, held))

    async def work_on(self, body: bytes, work: Callable[[], Result]) -> Result:
        """What `work`, whose cost grows with `body`, returns or raises."""
        if len(body) <= _SMALL_BYTES:
            return work()
        async with self._threads:
            return await asyncio.to_thread(work)

    async def make(self, num_entries: int, work: Callable[[], bytes]) -> bytes:
        """What `work` makes of an answer, whose cost grows with `num_entries` that it shows beside the text."""
        if num_entries <= _SMALL_ENTRIES:
            return work()
        async with self._answer_threads:
            return await asyncio.to_thread(work)


class _HeldAnswer(Response):
    """Calls `is_read` once what was written has left this process, or never will."""

    media_type = "application/json"

    def __init__(self, content: bytes, headers: dict[str, str], is_read: Callable[[], None]) -> None:
        super().__init__(content, 200, headers)
        self._is_read = is_read

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - as ASGI has it
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": self.body, "more_body": True})
            # The server writes what comes next only when most of what came before has been read.
            await send({"type": "http.response.body", "body": b""})
        finally:
            self._is_read()
