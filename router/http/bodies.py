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
