"""A scripted pair of workers behind real gRPC: no model, every event under the test's control.

By default a pair serves each request by itself: prefill sends the first token of each choice, decode the others, with
the tokens of `script`. A test switches parts of that off (`auto = False`, `hold_decode`), waits for commands and sends
events by hand. Synchronous servers in threads: they share no event loop with the router.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from dataclasses import dataclass
from typing import Any

import grpc

from kvtransfer.wire import protocols_to_proto
from tandem.core.protocols import Protocols
from tandem.rpc.v1 import common_pb2, decode_pb2, prefill_pb2
from tandem.rpc.v1.common_pb2 import ROLE_DECODE, ROLE_PREFILL
from tandem.rpc.v1.decode_pb2_grpc import (
    DecodeServiceServicer,
    DecodeServiceStub,
    add_DecodeServiceServicer_to_server,
)
from tandem.rpc.v1.prefill_pb2_grpc import PrefillServiceServicer, add_PrefillServiceServicer_to_server

STOP, LENGTH = common_pb2.FINISH_REASON_STOP, common_pb2.FINISH_REASON_LENGTH
WAIT_S = 60.0

#: (prompt ids, choice, index) → token id
Script = Callable[[list[int], int, int], int]


class ScriptedWorker:
    """One worker: `received` holds its commands in order; `emit` sends events."""

    kind: str  # "prefill" or "decode"

    def __init__(self, name: str, *, incarnation: str = "1", page_size: int = 16, port: int = 0) -> None:
        self.auto = True
        self.script: Script = lambda prompt, choice, index: 97 + (index + choice) % 26
        self.eos_id = 0
        self.heartbeat_s = 0.1
        self.received: list[Any] = []
        self.met: list[str] = []  # decode workers that a router has told it of
        self.status = common_pb2.WorkerStatus(pages=common_pb2.PageCounts(free=100, used=1, cached=2))
        if self.kind == "decode":
            self.status.prompt_steps.num_tokens = 12
        self._changed = threading.Condition()
        self._streams: list[queue.Queue[Any]] = []
        self._stream_of: dict[str, queue.Queue[Any]] = {}  # of the router that wants a request, by its id
        self._ended: list[threading.Event] = []  # of each stream
        self._stopped = threading.Event()
        self._silent = threading.Event()
        self.server = grpc.server(futures.ThreadPoolExecutor(16), options=[("grpc.so_reuseport", 0)])
        self._add_service()
        self.port = self.server.add_insecure_port(f"127.0.0.1:{port}")
        self.server.start()
        self.info = common_pb2.WorkerInfo(
            worker_id=name,
            incarnation=incarnation,
            role=self.role,
            address=f"127.0.0.1:{self.port}",
            node="testhost",
            pid=4242,
            layout=common_pb2.Layout(weights_sha256="w", dtype="float32", num_layers=1, page_size=page_size),
            transport="loopback",
            num_pages=103,
            max_context=256,
            vocab_size=512,
            protocols=protocols_to_proto(Protocols()),
        )

    role: Any
    events_type: Any

    def _add_service(self) -> None:
        raise NotImplementedError

    # -- the stream

    def Session(self, request_iterator: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:
        out: queue.Queue[Any] = queue.Queue()
        reader = threading.Thread(target=self._read, args=(request_iterator, out), daemon=True)
        context.add_callback(lambda: out.put(None))
        ended = threading.Event()
        self._ended.append(ended)
        self._streams.append(out)
        reader.start()
        try:
            yield self.events_type(events=[self._event(hello=self.info)], status=self.status)
            while True:
                try:
                    message = out.get(timeout=self.heartbeat_s)
                except queue.Empty:
                    message = self.events_type(status=self.status)
                if message is None:
                    return
                if not self._silent.is_set():
                    yield message
        finally:
            ended.set()

    def _read(self, commands: Iterator[Any], out: queue.Queue[Any]) -> None:
        try:
            for command in commands:
                said = getattr(command, command.WhichOneof("command"))
                if isinstance(said, prefill_pb2.Meet):  # of no request
                    self.met += [info.worker_id for info in said.decode]
                    continue
                self._stream_of[said.request_id] = out
                self.note(command)
                if self.auto:
                    self.answer(command)
        except grpc.RpcError:
            pass
        finally:
            for request_id in [r for r, own in list(self._stream_of.items()) if own is out]:
                self._stream_of.pop(request_id, None)
            out.put(None)

    def answer(self, command: Any) -> None:
        raise NotImplementedError

    def note(self, command: Any) -> None:
        """Keep what came, for `wait_for`."""
        with self._changed:
            self.received.append(command)
            self._changed.notify_all()

    def _event(self, **event: Any) -> Any:
        raise NotImplementedError

    # -- for tests

    def emit(self, **event: Any) -> None:
        """Send one event, as `emit(token=...)`, to the router that wants its request; else on the newest stream."""
        self.emit_all([self._event(**event)])

    def emit_all(self, events: list[Any], status: common_pb2.WorkerStatus | None = None) -> None:
        """The same of several events of one request; with a report of the worker, where one is given."""
        if events:
            first = getattr(events[0], events[0].WhichOneof("event"))
            stream = self._stream_of.get(getattr(first, "request_id", ""), self._streams[-1])
            stream.put(self.events_type(events=events, status=status))

    def wait_for(self, kind: str, num: int = 1, timeout_s: float = WAIT_S) -> Any:
        """The `num`th command of this kind (from 1)."""

        def found() -> list[Any]:
            return [getattr(c, kind) for c in self.received if c.WhichOneof("command") == kind]

        with self._changed:
            if not self._changed.wait_for(lambda: len(found()) >= num, timeout_s):
                kinds = [c.WhichOneof("command") for c in self.received]
                raise AssertionError(f"{self.info.worker_id} got no {kind} number {num}; it got {kinds}")
            return found()[num - 1]

    def count(self, kind: str) -> int:
        with self._changed:
            return sum(c.WhichOneof("command") == kind for c in self.received)

    def go_silent(self) -> None:
        """The stream stays open and nothing comes any more."""
        self._silent.set()

    def speak_again(self) -> None:
        self._silent.clear()

    def kill(self) -> None:
        """The connection breaks, behind what was said before."""
        self._stopped.set()
        for stream, ended in zip(self._streams, self._ended, strict=False):
            stream.put(None)
            ended.wait(1.0)  # longer only for a router that does not read
        self.server.stop(grace=0).wait()

    def fail(self, request_id: str, attempt: int, code: str, *, retryable: bool, reason: str = "") -> None:
        error = common_pb2.Error(code=code, message=f"scripted {code}", retryable=retryable, reason=reason)
        self.emit(failed=common_pb2.AttemptFailed(request_id=request_id, attempt=attempt, error=error))

    def token(self, start: Any, choice: int, index: int, token_id: int | None = None) -> common_pb2.Token:
        """The scripted token, with its finish reason by the request's own limits."""
        chosen = self.script(list(start.prompt_ids), choice, index) if token_id is None else token_id
        reason = LENGTH if index + 1 >= start.sampling.max_tokens else common_pb2.FINISH_REASON_UNSPECIFIED
        if chosen == self.eos_id:
            reason = STOP
        token = common_pb2.Token(
            request_id=start.request_id,
            attempt=start.attempt,
            choice=choice,
            index=index,
            token_id=chosen,
            finish_reason=reason,
            logprob=-0.5,
        )
        for rank in range(max(0, start.sampling.num_logprobs)):
            token.top_logprobs.add(token_id=98 + rank, logprob=-1.0 - rank)
        return token

    def scored(self, start: Any) -> None:
        """Log-probabilities of the prompt's tokens, where they are wanted: minus an eighth of its index for each."""
        if not start.HasField("scoring"):
            return
        first = start.scoring.num_known
        scored = common_pb2.PromptScored(request_id=start.request_id, attempt=start.attempt, first=first)
        for index in range(first, len(start.prompt_ids)):
            token = scored.tokens.add(logprob=-index / 8, rank=index)
            for rank in range(start.scoring.num_top):
                token.top_logprobs.add(token_id=98 + rank, logprob=-1.0 - rank)
        self.emit(scored=scored)

    def given(self, start: Any) -> dict[int, int]:
        """How many tokens each choice has in the journal that came with the request."""
        return {entry.choice: len(entry.token_ids) for entry in start.journal}


class ScriptedPrefill(ScriptedWorker, PrefillServiceServicer):
    role, events_type, kind = ROLE_PREFILL, prefill_pb2.PrefillEvents, "prefill"
    num_cached_tokens = 1  # of each prompt
    num_computed_tokens = 3
    vector = (3.0, 4.0)  # of each prompt that is pooled

    def __init__(self, name: str, **options: Any) -> None:
        self._attached: set[tuple[str, int]] = set()  # whom decode has let write: (request id, attempt)
        self._decode_of: dict[tuple[str, int], str] = {}  # the address to attach at: by (request id, attempt)
        super().__init__(name, **options)

    def _add_service(self) -> None:
        add_PrefillServiceServicer_to_server(self, self.server)

    def _event(self, **event: Any) -> prefill_pb2.PrefillEvent:
        return prefill_pb2.PrefillEvent(**event)

    def answer(self, command: prefill_pb2.PrefillCommand) -> None:
        """Computes on `start`, hands off on `attach`."""
        if command.WhichOneof("command") == "start" and command.start.pools:
            self.pooled(command.start)
        elif command.WhichOneof("command") == "start":
            self.first_tokens(command.start)
        elif (command.attach.request_id, command.attach.attempt) in self._attached:
            self.handoff_done(command.attach)

    def note(self, command: prefill_pb2.PrefillCommand) -> None:
        """Attaches at decode as the real one does, whether the rest is scripted or not."""
        if command.WhichOneof("command") == "start":
            self._decode_of[command.start.request_id, command.start.attempt] = command.start.decode.address
        super().note(command)
        if command.WhichOneof("command") == "attach":
            with contextlib.suppress(grpc.RpcError):  # decode is gone: the router hears of that by itself
                self._attach(command.attach)

    def _attach(self, attach: prefill_pb2.AttachGrant) -> None:
        key = (attach.request_id, attach.attempt)
        request = decode_pb2.AttachRequest(
            request_id=attach.request_id, attempt=attach.attempt, grant_id=attach.grant.grant_id
        )
        with grpc.insecure_channel(self._decode_of[key]) as channel:
            DecodeServiceStub(channel).Attach(request, timeout=WAIT_S)
        self._attached.add(key)

    def first_tokens(self, start: prefill_pb2.StartPrefill) -> None:
        self.started(start)
        self.scored(start)
        given = self.given(start)
        tokens = [self.token(start, c, 0) for c in range(start.num_choices) if c not in given]
        self.emit_all([self._event(first_token=token) for token in tokens])
        if tokens and all(token.finish_reason for token in tokens):
            self.emit(
                ended=prefill_pb2.PrefillEnded(request_id=start.request_id, attempt=start.attempt, compute_s=0.01)
            )

    def pooled(self, start: prefill_pb2.StartPrefill) -> None:
        self.started(start)
        names = {"request_id": start.request_id, "attempt": start.attempt}
        self.emit(pooled=prefill_pb2.PromptPooled(**names, values=self.vector))
        self.emit(ended=prefill_pb2.PrefillEnded(**names, compute_s=0.01))

    def started(self, start: prefill_pb2.StartPrefill) -> None:
        self.emit(
            started=prefill_pb2.PrefillStarted(
                request_id=start.request_id, attempt=start.attempt, num_cached_tokens=self.num_cached_tokens
            )
        )

    def handoff_done(self, attach: prefill_pb2.AttachGrant) -> None:
        self.status.prompt_tokens_computed += self.num_computed_tokens
        self.status.busy_s += 0.01
        done = prefill_pb2.HandoffDone(
            request_id=attach.request_id,
            attempt=attach.attempt,
            num_bytes=1000,
            handoff_s=0.002,
            exposed_s=0.001,
            compute_s=0.01,
            num_computed_tokens=self.num_computed_tokens,
            num_cached_tokens=self.num_cached_tokens,
            spans=[common_pb2.WorkSpan(name="commit", begin_s=0.002, end_s=0.001)],
        )
        self.emit_all([self._event(handoff_done=done)], self.status)


@dataclass(frozen=True)
class Attached:
    """Prefill's call, kept among the router's commands."""

    attach: decode_pb2.AttachRequest

    def WhichOneof(self, group: str) -> str:
        return "attach"


class ScriptedDecode(ScriptedWorker, DecodeServiceServicer):
    role, events_type, kind = ROLE_DECODE, decode_pb2.DecodeEvents, "decode"

    def __init__(self, name: str, **options: Any) -> None:
        self.token_gap_s = 0.0
        self.held_back = threading.Event()  # set: generation goes on
        self.held_back.set()
        # Prompt tokens that are not in its cache: no more than `max_local_tokens` of them it computes by itself.
        self.num_missing_tokens = 10_000
        # As prefill workers find it.
        self.hangs = False  # at `Attach` and `ConfirmIdle`
        self.knows_streams = True  # and says so when one is opened
        self.knows_trials = True  # of connections
        self.opened_by: list[str] = []  # streams of commits: the incarnations
        self.num_streams = 0
        self.called = threading.Event()  # by anything that may hang, or a commit
        self.broken = threading.Event()  # set: a stream breaks with its next commit
        self.stream_ended = threading.Event()
        super().__init__(name, **options)

    def _add_service(self) -> None:
        add_DecodeServiceServicer_to_server(self, self.server)

    def _event(self, **event: Any) -> decode_pb2.DecodeEvent:
        return decode_pb2.DecodeEvent(**event)

    def Pair(self, request: decode_pb2.PairRequest, context: Any) -> decode_pb2.PairReply:
        return decode_pb2.PairReply(decode=self.info)

    def AwaitGreeting(
        self, request: decode_pb2.AwaitGreetingRequest, context: Any
    ) -> decode_pb2.AwaitGreetingReply:
        """The one that opens a connection has come, and that of a trial if this worker knows of such."""
        return decode_pb2.AwaitGreetingReply(has_come=True, trial=request.trial if self.knows_trials else 0)

    def ConfirmIdle(self, request: decode_pb2.ConfirmIdleRequest, context: Any) -> decode_pb2.ConfirmIdleReply:
        self._hang(context)
        return decode_pb2.ConfirmIdleReply()

    def Commits(
        self, request_iterator: Iterator[decode_pb2.CommitCall], context: grpc.ServicerContext
    ) -> Iterator[decode_pb2.CommitAnswer]:
        """Says yes to each."""
        self.num_streams += 1
        try:
            for call in request_iterator:
                if call.HasField("opened"):
                    self.opened_by.append(call.opened.sender_incarnation)
                    if self.knows_streams:
                        yield decode_pb2.CommitAnswer()
                    continue
                self.called.set()
                if self.broken.is_set():
                    context.abort(grpc.StatusCode.UNAVAILABLE, "broken")
                yield decode_pb2.CommitAnswer(request_id=call.commit.request_id, ok=True)
        finally:
            self.stream_ended.set()

    def _hang(self, context: grpc.ServicerContext) -> None:
        self.called.set()
        if self.hangs:
            self._stopped.wait()
            context.abort(grpc.StatusCode.UNAVAILABLE, "killed")

    def answer(self, command: decode_pb2.DecodeCommand) -> None:
        """Grants on `reserve`, or computes by itself."""
        if command.WhichOneof("command") != "reserve":
            return
        reserve = command.reserve
        if self.num_missing_tokens <= reserve.max_local_tokens:
            self.compute_locally(reserve)
        else:
            self.grant(reserve)

    def Attach(self, request: decode_pb2.AttachRequest, context: Any) -> decode_pb2.AttachReply:
        """Prefill says that it will write: with nothing scripted, the handoff succeeds at once."""
        self._hang(context)
        is_auto = self.auto  # before a test hears of it, and may go on to change that
        self.note(Attached(request))
        key = (request.request_id, request.attempt)
        reserves = (c.reserve for c in self.received if c.WhichOneof("command") == "reserve")
        reserve = next(r for r in reserves if (r.request_id, r.attempt) == key)
        # With one token the first one ends it, and prefill hands nothing off.
        if is_auto and reserve.sampling.max_tokens > 1:
            threading.Thread(target=self.generate, args=(reserve,), daemon=True).start()
        return decode_pb2.AttachReply(ok=True, lease_s=10)

    def grant(self, reserve: decode_pb2.Reserve) -> None:
        grant = decode_pb2.Grant(
            grant_id=f"g-{reserve.request_id}-{reserve.attempt}",
            request_id=reserve.request_id,
            attempt=reserve.attempt,
            pages=[1, 2],
            lease_s=10,
        )
        self.emit(granted=grant)

    def compute_locally(self, reserve: decode_pb2.Reserve) -> None:
        self.emit(
            local=decode_pb2.ComputesHere(
                request_id=reserve.request_id,
                attempt=reserve.attempt,
                num_cached_tokens=64,
                num_computed_tokens=self.num_missing_tokens,
            )
        )
        self.scored(reserve)
        threading.Thread(target=self._give_tokens, args=(reserve, 0), daemon=True).start()

    def admit(self, reserve: decode_pb2.Reserve) -> None:
        self.emit(admitted=decode_pb2.Admitted(request_id=reserve.request_id, attempt=reserve.attempt))

    def generate(self, reserve: decode_pb2.Reserve) -> None:
        self.admit(reserve)
        self._give_tokens(reserve, 1)

    def _give_tokens(self, reserve: decode_pb2.Reserve, first: int) -> None:
        """All tokens from number `first` on that the client does not have."""
        given = self.given(reserve)
        ended = {entry.choice for entry in reserve.journal if entry.finished}
        for choice in set(range(reserve.num_choices)) - ended:
            for index in range(max(first, given.get(choice, 0)), reserve.sampling.max_tokens):
                self.held_back.wait(WAIT_S)
                if self.token_gap_s:
                    time.sleep(self.token_gap_s)
                if self._is_cancelled(reserve):
                    return
                token = self.token(reserve, choice, index)
                self.emit(token=token)
                if token.finish_reason:
                    break

    def _is_cancelled(self, reserve: decode_pb2.Reserve) -> bool:
        with self._changed:
            return self._stopped.is_set() or any(
                c.WhichOneof("command") == "cancel"
                and (c.cancel.request_id, c.cancel.attempt) == (reserve.request_id, reserve.attempt)
                for c in self.received
            )
