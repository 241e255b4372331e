"""What a router says to a pair of workers for one request, step by step, and what it hears: without a router."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import grpc

from tandem.core.errors import TandemError, WorkerLostError
from tandem.core.sampling import SamplingParams
from tandem.rpc.channel import make_channel
from tandem.rpc.convert import error_from_proto, sampling_to_proto
from tandem.rpc.v1 import common_pb2 as pb
from tandem.rpc.v1 import decode_pb2, prefill_pb2
from tandem.rpc.v1.decode_pb2_grpc import DecodeServiceStub
from tandem.rpc.v1.prefill_pb2_grpc import PrefillServiceStub

_ATTEMPT = 1


@dataclass
class Handoff:
    """One request and what was heard of it."""

    request_id: str
    attaches_at_once: bool
    grant: decode_pb2.Grant | None = None
    has_first_token: bool = False
    token_ids: dict[int, int] = field(default_factory=dict)  # by their place in the output
    done: prefill_pb2.HandoffDone | None = None
    admission_s: float | None = None  # the commit's arrival at decode to the request's place in the batch
    has_ended: bool = False
    error: TandemError | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)


class PairSession:
    """A session with each worker; use as `async with`.

    Attributes:
        decode_info: what the decode worker says of itself.
        step_s: when each message with tokens came from decode, on the monotonic clock: one for each step.
    """

    def __init__(self, prefill_address: str, decode_address: str) -> None:
        self._addresses = {"prefill": prefill_address, "decode": decode_address}
        self._channels: list[Any] = []
        self._calls: dict[str, Any] = {}
        self._writing = {"prefill": asyncio.Lock(), "decode": asyncio.Lock()}
        self._readers: list[asyncio.Task[None]] = []
        self._handoffs: dict[str, Handoff] = {}
        self._ends: dict[str, WorkerLostError] = {}  # of sessions, by role
        self._numbers = itertools.count()
        self.decode_info: asyncio.Future[pb.WorkerInfo] = asyncio.get_running_loop().create_future()
        self.step_s: list[float] = []

    async def __aenter__(self) -> PairSession:
        stubs: dict[str, Any] = {"prefill": PrefillServiceStub, "decode": DecodeServiceStub}
        for role, address in self._addresses.items():
            channel = make_channel(address)
            self._channels.append(channel)
            self._calls[role] = stubs[role](channel).Session()
            self._readers.append(asyncio.create_task(self._read(role)))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for call in self._calls.values():
            call.cancel()
        await asyncio.gather(*self._readers, return_exceptions=True)
        for channel in self._channels:
            await channel.close()

    # -- asking

    async def begin(self, prompt: Sequence[int], num_tokens: int, *, attaches_at_once: bool = True) -> Handoff:
        """Start `prompt` at prefill and reserve its pages at decode, as a router does.

        Args:
            attaches_at_once: hand the grant on as it comes; else when `attach` is called.
        """
        handoff = Handoff(f"parts-{next(self._numbers)}", attaches_at_once)
        self._handoffs[handoff.request_id] = handoff
        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        common: dict[str, Any] = {
            "request_id": handoff.request_id,
            "attempt": _ATTEMPT,
            "prompt_ids": prompt,
            "sampling": sampling_to_proto(params),
            "num_choices": 1,
        }
        start = prefill_pb2.StartPrefill(**common, decode=await self.decode_info)
        await self._say("prefill", prefill_pb2.PrefillCommand(start=start))
        await self._say("decode", decode_pb2.DecodeCommand(reserve=decode_pb2.Reserve(**common)))
        return handoff

    async def attach(self, handoff: Handoff) -> None:
        """Give prefill the grant."""
        attach = prefill_pb2.AttachGrant(request_id=handoff.request_id, attempt=_ATTEMPT, grant=handoff.grant)
        await self._say("prefill", prefill_pb2.PrefillCommand(attach=attach))

    async def until(self, handoff: Handoff, condition: Callable[[Handoff], object]) -> None:
        """Until what was heard makes `condition` true. Raises what the workers say went wrong."""
        while not condition(handoff):
            if handoff.error is not None:
                raise handoff.error
            handoff.changed.clear()
            await handoff.changed.wait()

    async def finish(self, handoff: Handoff) -> None:
        """Until it is handed off and its last token has come; then prefill lets go of its pages."""
        await self.until(handoff, lambda h: h.has_ended and h.done is not None and h.admission_s is not None)
        del self._handoffs[handoff.request_id]
        release = prefill_pb2.Release(request_id=handoff.request_id)
        await self._say("prefill", prefill_pb2.PrefillCommand(release=release))

    async def cancel_all(self) -> None:
        """Nobody wants what is under way any more."""
        for request_id in list(self._handoffs):
            del self._handoffs[request_id]
            cancel = pb.Cancel(request_id=request_id, attempt=_ATTEMPT, reason="the measurement is over")
            await self._say("decode", decode_pb2.DecodeCommand(cancel=cancel))
            await self._say("prefill", prefill_pb2.PrefillCommand(cancel=cancel))

    async def _say(self, role: str, command: Any) -> None:
        # Whoever says it may be cancelled meanwhile; a write that is cancelled would end the whole session.
        await asyncio.shield(self._write(role, command))

    async def _write(self, role: str, command: Any) -> None:
        try:
            async with self._writing[role]:
                await self._calls[role].write(command)
        except (grpc.RpcError, asyncio.InvalidStateError) as error:
            raise self._ends.get(role) or WorkerLostError(f"the {role} worker is gone: {error}") from error

    # -- hearing

    async def _read(self, role: str) -> None:
        why = f"the {role} worker ended its stream"
        try:
            async for message in self._calls[role]:
                now_s = time.monotonic()
                if role == "decode" and any(event.HasField("token") for event in message.events):
                    self.step_s.append(now_s)
                for event in message.events:
                    await self._hear(event)
        except grpc.RpcError as error:
            why = f"the connection to the {role} worker broke: {error}"
        finally:
            self._ends[role] = WorkerLostError(why)
            self._lost(self._ends[role])

    def _lost(self, error: TandemError) -> None:
        if not self.decode_info.done():
            self.decode_info.set_exception(error)
        for handoff in self._handoffs.values():
            handoff.error = handoff.error or error
            handoff.changed.set()

    async def _hear(self, event: Any) -> None:
        kind = event.WhichOneof("event")
        message = getattr(event, kind)
        if kind == "hello":
            if message.role == pb.ROLE_DECODE:
                self.decode_info.set_result(message)
            return
        if kind in ("cached", "link"):  # of no request
            return
        handoff = self._handoffs.get(message.request_id)
        if handoff is None:
            return
        match kind:
            case "granted":
                handoff.grant = message
                if handoff.attaches_at_once:
                    await self.attach(handoff)
            case "first_token":
                handoff.has_first_token = True
                handoff.token_ids[message.index] = message.token_id
            case "handoff_done":
                handoff.done = message
            case "admitted":
                handoff.admission_s = message.admission_s
            case "token":
                handoff.token_ids[message.index] = message.token_id
                handoff.has_ended = bool(message.finish_reason)
            case "failed":
                handoff.error = error_from_proto(message.error)
        handoff.changed.set()
