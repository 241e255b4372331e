"""Drives conversations: each turn is sent when the one before it was answered and its user has thought.

A request is built when its turn comes, as it holds the answers before it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from tandem.bench.load.conversations import Conversation
from tandem.bench.load.drive import Driver, Load
from tandem.bench.load.http_client import LoadClient
from tandem.bench.load.records import RequestRecord


class ConversationDriver(Driver):
    """Holds the conversations of one run. A turn that fails ends its conversation."""

    def __init__(
        self,
        client: LoadClient,
        conversations: Sequence[Conversation],
        model: str,
        on_record: Callable[[RequestRecord], None] = lambda _: None,
        *,
        ignore_eos: bool = True,
    ) -> None:
        super().__init__(client, on_record)
        self._conversations, self._model, self._ignore_eos = conversations, model, ignore_eos

    async def closed_loop(self, concurrency: int) -> Load:
        """`concurrency` users, each with one conversation after the other."""
        conversations = iter(self._conversations)

        async def user() -> None:
            for conversation in conversations:  # shared: each takes the next
                await self._converse(conversation)

        self._begin()
        await asyncio.gather(*(user() for _ in range(min(concurrency, len(self._conversations)))))
        return self._end()

    async def open_loop(self, arrivals_s: Sequence[float]) -> Load:
        """Each conversation begins at its time, in seconds from the beginning."""
        self._begin()
        await asyncio.gather(*(self._come(*come) for come in zip(self._conversations, arrivals_s, strict=True)))
        return self._end()

    async def _come(self, conversation: Conversation, arrival_s: float) -> None:
        await self._sleep(max(0.0, self._began_s + arrival_s - time.monotonic()))
        await self._converse(conversation, arrival_s)

    async def _converse(self, conversation: Conversation, planned_s: float | None = None) -> None:
        """`planned_s` is when it was to begin."""
        while conversation.num_left:
            if conversation.think_s:
                await self._sleep(conversation.think_s)
            if self._stopped.is_set():
                self._load.num_unsent += conversation.num_left
                return
            job = conversation.job
            body = conversation.body(self._model, ignore_eos=self._ignore_eos)
            outcome = await self._client.request(self._client.message("POST", conversation.path, body))
            record = self._keep(job, planned_s, outcome)
            if not record.is_good or outcome.stream is None:
                self._load.num_unsent += conversation.num_left - 1
                return
            planned_s = None  # of later turns the answers decide
            conversation.take(outcome.stream.text, record.num_input, record.num_output)
