"""The other routers of the cluster, on whichever hosts, as the supervisor has told of them; and what one asks another.

Each answers in its control service, from the event loop that serves its clients. One that does not answer in time is
stopped, stuck or beyond a broken link.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import grpc
from grpc import aio

from tandem.core.errors import ConfigError
from tandem.rpc.channel import make_channel
from tandem.rpc.v1.control_pb2 import OtherRouter, RouterAnswer, RouterQuestion
from tandem.rpc.v1.control_pb2_grpc import RouterControlStub

if TYPE_CHECKING:
    from tandem.rpc.v1.control_pb2_grpc import RouterControlAsyncStub

_log = logging.getLogger(__name__)

_ANSWER_S = 1.0
"""A router that takes longer to answer another is stopped, or as good as that."""

_GRACE_S = 2 * _ANSWER_S
"""For questions under way to a router that is forgotten: whoever asked would be cancelled with them."""
_SILENT = {grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED}
"""Said for a router that is stuck, or has ended and is not known to have."""

Answer: TypeAlias = Callable[[bytes], bytes]
"""What is answered to a question of one kind. Raises `ValueError` for text that is no such question."""


@dataclass(frozen=True, slots=True)
class _Reached:
    channel: aio.Channel
    stub: RouterControlAsyncStub
    shares_port: bool


class OtherRouters:
    """Of one router; in its event loop."""

    def __init__(self) -> None:
        self._answers: dict[str, Answer] = {}
        self._reached: dict[tuple[str, str], _Reached] = {}  # by name and address
        self._closing = set[asyncio.Task[None]]()

    def __len__(self) -> int:
        return len(self._reached)

    def on_question(self, kind: str, answer: Answer) -> None:
        """From now on this router answers questions of this kind."""
        self._answers[kind] = answer

    # -- who they are

    def apply(self, others: Iterable[OtherRouter]) -> None:
        """The supervisor says that these are there."""
        told = {(other.name, other.control_address): other for other in others if other.control_address}
        for key in self._reached.keys() - told.keys():
            self._forget(key)
        for key in told.keys() - self._reached.keys():
            try:
                channel = make_channel(told[key].control_address)
            except ConfigError as error:
                _log.error("%s cannot be asked or told anything: %s", told[key].name, error)
                continue
            self._reached[key] = _Reached(channel, RouterControlStub(channel), told[key].shares_port)

    def _forget(self, key: tuple[str, str]) -> None:
        closing = asyncio.create_task(self._reached.pop(key).channel.close(_GRACE_S))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        for key in list(self._reached):
            self._forget(key)
        await asyncio.gather(*self._closing)

    # -- questions

    async def ask(
        self, kind: str, text: bytes = b"", *, of_port: bool = False, but: Collection[str] = ()
    ) -> dict[str, bytes | None]:
        """What each other router answers, by its name; `None`: nothing in time, or it does not know the question.

        Args:
            of_port: only those are asked that share the port of this one.
            but: names of those that are not asked.
        """
        question = RouterQuestion(kind=kind, text=text)
        calls = {  # all begun here: a router may be forgotten meanwhile
            name: reached.stub.AskRouter(question, timeout=_ANSWER_S)
            for (name, _), reached in sorted(self._reached.items())
            if name not in but and (reached.shares_port or not of_port)
        }
        told = await asyncio.gather(*(self._answer_of(name, kind, call) for name, call in calls.items()))
        return dict(zip(calls, told, strict=True))

    async def _answer_of(self, name: str, kind: str, call: Awaitable[RouterAnswer]) -> bytes | None:
        try:
            answer = await call
        except aio.AioRpcError as error:
            if error.code() not in _SILENT:
                _log.warning("%s did not answer %r: %s, %s", name, kind, error.code().name, error.details())
            return None
        return answer.text if answer.HasField("text") else None

    def answer(self, question: RouterQuestion) -> bytes | None:
        """What this router answers another; `None`: it knows no such question."""
        answer = self._answers.get(question.kind)
        if answer is None:
            return None
        try:
            return answer(question.text)
        except ValueError as error:
            _log.warning("another router asks what is no question of the kind %r: %s", question.kind, error)
            return None
