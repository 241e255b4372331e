"""A scripted router: one session with each worker of a pair, and what it heard on them."""

from __future__ import annotations

import asyncio
import itertools
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kvtransfer.protocol.grants import GrantState
from kvtransfer.protocol.messages import AttemptKey
from tandem.core.sampling import SamplingParams
from tandem.rpc.channel import make_channel
from tandem.rpc.convert import sampling_to_proto
from tandem.rpc.v1 import common_pb2 as pb
from tandem.rpc.v1 import decode_pb2, prefill_pb2
from tandem.rpc.v1.decode_pb2_grpc import DecodeServiceStub
from tandem.rpc.v1.prefill_pb2_grpc import PrefillServiceStub
from tests.support.waiting import until
from tests.support.worker_pair import WAIT_S, WorkerPair


@dataclass
class Ask:
    """A request as the router has it."""

    prompt: list[int]
    params: SamplingParams = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)  # noqa: RUF009 - frozen
    n: int = 1
    request_id: str = ""
    attempt: int = 1
    priority: int = 0
    age_s: float = 0.0
    journal: tuple[pb.ChoiceJournal, ...] = ()
    local: int = 0  # tokens that decode may compute by itself
    num_top: int | None = None  # likeliest tokens beside each of the prompt's own; `None`: no log-probabilities
    num_known: int = 1  # leading tokens whose log-probabilities are there

    @property
    def key(self) -> AttemptKey:
        return AttemptKey(self.request_id, self.attempt)


@dataclass
class Outcome:
    """What a router has heard of one attempt."""

    tokens: dict[int, dict[int, int]] = field(default_factory=lambda: defaultdict(dict))  # choice → index → id
    logprobs: dict[int, dict[int, list[float]]] = field(
        default_factory=lambda: defaultdict(dict)
    )  # own, then likeliest
    finished: dict[int, int] = field(default_factory=dict)  # choice → finish reason
    kinds: list[str] = field(default_factory=list)  # of all other events, with their side: "decode.granted"
    grant: decode_pb2.Grant | None = None
    local: decode_pb2.ComputesHere | None = None
    chunks: list[tuple[str, int]] = field(default_factory=list)  # that decode computed of the prompt, and their tokens
    done: prefill_pb2.HandoffDone | None = None
    scores: list[tuple[str, int, pb.TokenScore]] = field(default_factory=list)  # side, index in the prompt
    failures: dict[str, pb.Error] = field(default_factory=dict)  # by side

    def ids(self, choice: int = 0) -> list[int]:
        tokens = self.tokens[choice]
        assert sorted(tokens) == list(range(min(tokens, default=0), min(tokens, default=0) + len(tokens))), tokens
        return [tokens[i] for i in sorted(tokens)]


_ROUTERS = itertools.count()


class Router:
    """One router: a session with each worker. Use as `async with`."""

    def __init__(self, pair: WorkerPair, name: str = "r") -> None:
        self._pair = pair
        self._name = name
        self._number = next(_ROUTERS)  # request ids are never used again: workers remember ended attempts
        self._num_asks = 0
        self.outcomes: defaultdict[AttemptKey, Outcome] = defaultdict(Outcome)
        self.suspected: list[decode_pb2.WriterSuspected] = []
        self.links: list[prefill_pb2.LinkChanged] = []
        self.infos: dict[str, pb.WorkerInfo] = {}
        self.statuses: dict[str, pb.WorkerStatus] = {}
        self.num_commands: dict[str, int] = {}  # that the status of a side shows
        self.attaches = True  # hand each grant on at once
        self.ended: set[str] = set()  # sides whose stream is over
        self._asks: dict[AttemptKey, Ask] = {}
        self._heard = asyncio.Event()
        self._calls: dict[str, Any] = {}
        self._channels: dict[str, Any] = {}
        self._writing = {"prefill": asyncio.Lock(), "decode": asyncio.Lock()}
        self._may_read = {"prefill": asyncio.Event(), "decode": asyncio.Event()}
        self._readers: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Router:
        stubs = {"prefill": PrefillServiceStub, "decode": DecodeServiceStub}
        for side, worker in (("prefill", self._pair.prefill), ("decode", self._pair.decode)):
            channel = self._channels[side] = make_channel(worker.parts.info.address)
            self._calls[side] = stubs[side](channel).Session()
            self._may_read[side].set()
            self._readers.append(asyncio.create_task(self._read(side)))
        await self.until(lambda: len(self.infos) == 2 or self.ended, "both hellos")
        for reader in self._readers:
            if reader.done():
                reader.result()  # raises what the stream ended with
        return self

    async def __aexit__(self, *_: object) -> None:
        for side in list(self._calls):
            self.close(side)
            self._may_read[side].set()
        await asyncio.gather(*self._readers, return_exceptions=True)
        for channel in self._channels.values():
            await channel.close()

    def close(self, side: str) -> None:
        """Break the stream to one worker."""
        self._calls.pop(side).cancel()

    def stop_reading(self, side: str) -> None:
        """Hang, with an open stream."""
        self._may_read[side].clear()

    async def heard_of(self, request_id: str, num: int, side: str) -> None:
        """Until `num` events of a request have come from a worker."""
        outcome = self.outcomes[AttemptKey(request_id, 0)]
        await self.until(lambda: outcome.kinds.count(f"{side}.failed") >= num, f"{num} events of {request_id}")

    def stub(self, side: str) -> Any:
        return {"prefill": PrefillServiceStub, "decode": DecodeServiceStub}[side](self._channels[side])

    # -- hearing

    async def _read(self, side: str) -> None:
        try:
            async for message in self._calls[side]:
                self.statuses[side] = message.status
                self.num_commands[side] = message.num_commands
                for event in message.events:
                    await self._hear(side, event)
                self._heard.set()
                await self._may_read[side].wait()
        finally:
            self.ended.add(side)
            self._heard.set()

    async def _hear(self, side: str, event: Any) -> None:
        kind = event.WhichOneof("event")
        message = getattr(event, kind)
        if kind == "hello":
            self.infos[side] = message
            return
        if kind == "writer_suspected":
            self.suspected.append(message)
            return
        if kind == "link":
            self.links.append(message)
            return
        if kind == "cached":
            return
        key = AttemptKey(message.request_id, message.attempt)
        outcome = self.outcomes[key]
        if kind in ("token", "first_token"):
            known = outcome.tokens[message.choice].setdefault(message.index, message.token_id)
            assert known == message.token_id, f"{key} choice {message.choice} index {message.index} came twice"
            outcome.logprobs[message.choice][message.index] = [
                message.logprob,
                *(t.logprob for t in message.top_logprobs),
            ]
            if message.finish_reason:
                outcome.finished[message.choice] = message.finish_reason
            return
        if kind == "scored":
            assert not outcome.tokens, "before the first token of a choice"
            outcome.scores += [(side, n, token) for n, token in enumerate(message.tokens, message.first)]
            return
        if kind == "computed":
            outcome.chunks = [(span.name, span.count) for span in message.spans]
            return
        outcome.kinds.append(f"{side}.{kind}")
        if kind == "granted":
            outcome.grant = message
            if self.attaches:
                await self.attach(self._asks[key])
        elif kind == "local":
            outcome.local = message
        elif kind == "handoff_done":
            outcome.done = message
        elif kind == "failed":
            outcome.failures[side] = message.error

    async def until(self, condition: Callable[[], object], what: str, timeout_s: float = WAIT_S) -> None:
        """Until what was heard makes `condition()` true."""
        async with asyncio.timeout(timeout_s):
            while not condition():
                self._heard.clear()
                await self._heard.wait()

    async def heard(self, ask: Ask, *kinds: str) -> None:
        """Until each of `kinds` (`decode.granted`) has come for an attempt."""
        await self.until(lambda: set(kinds) <= set(self.outcomes[ask.key].kinds), f"{kinds} of {ask.key}")

    # -- saying

    async def say(self, side: str, **command: Any) -> None:
        message = prefill_pb2.PrefillCommand if side == "prefill" else decode_pb2.DecodeCommand
        async with self._writing[side]:
            await self._calls[side].write(message(**command))

    def name(self, ask: Ask) -> Ask:
        if not ask.request_id:
            self._num_asks += 1
            ask.request_id = f"{self._name}-{self._number}-{self._num_asks}"
        self._asks[ask.key] = ask
        return ask

    async def reserve(self, ask: Ask) -> Ask:
        self.name(ask)
        await self.say("decode", reserve=decode_pb2.Reserve(**self._common(ask), max_local_tokens=ask.local))
        return ask

    async def start(self, ask: Ask) -> Ask:
        self.name(ask)
        start = prefill_pb2.StartPrefill(**self._common(ask), decode=self.infos["decode"])
        await self.say("prefill", start=start)
        return ask

    def _common(self, ask: Ask) -> dict[str, Any]:
        return {
            "request_id": ask.request_id,
            "attempt": ask.attempt,
            "priority": ask.priority,
            "age_s": ask.age_s,
            "prompt_ids": ask.prompt,
            "sampling": sampling_to_proto(ask.params),
            "num_choices": ask.n,
            "journal": ask.journal,
            "scoring": None if ask.num_top is None else pb.PromptScoring(num_top=ask.num_top, num_known=ask.num_known),
        }

    async def attach(self, ask: Ask, grant: decode_pb2.Grant | None = None) -> None:
        grant = grant or self.outcomes[ask.key].grant
        attach = prefill_pb2.AttachGrant(request_id=ask.request_id, attempt=ask.attempt, grant=grant)
        await self.say("prefill", attach=attach)

    async def until_attached(self, ask: Ask) -> None:
        """Until decode has taken prefill as the grant's writer, and prefill knows: its next layer tells the driver."""
        core = self._pair.prefill.core

        def is_attached() -> bool:
            record = self._pair.decode.driver._handoffs.record(ask.key)
            job = core.jobs.get(ask.key)
            knows = ask.key in core._newly_attached or (job is not None and job.attached)
            return record is not None and record.state is GrantState.OPEN and knows

        await until(is_attached, f"an attached grant of {ask.key}")

    async def cancel(self, ask: Ask, *sides: str) -> None:
        for side in sides or ("prefill", "decode"):
            await self.say(side, cancel=pb.Cancel(request_id=ask.request_id, attempt=ask.attempt, reason="test"))

    async def begin(self, ask: Ask) -> Ask:
        """Start and reserve, as a real router does: prefill hears of the prompt before it gets the grant."""
        await self.start(ask)
        return await self.reserve(ask)

    async def finish(self, ask: Ask) -> Outcome:
        """Until every choice has ended, and all before that was heard; a failure of either side fails the test.

        The streams of the two workers are not ordered: decode's last token may come before prefill's first one, and
        before prefill's word of the handoff.
        """
        outcome = self.outcomes[ask.key]
        num_wanted = ask.n - sum(j.finished for j in ask.journal)
        num_known = {j.choice: len(j.token_ids) for j in ask.journal}

        def over() -> bool:
            are_whole = all(num_known.get(choice, 0) in outcome.tokens[choice] for choice in outcome.finished)
            is_told = outcome.done is not None or outcome.local is not None or "decode.admitted" not in outcome.kinds
            return (len(outcome.finished) >= num_wanted and are_whole and is_told) or bool(outcome.failures)

        await self.until(over, f"the end of {ask.key}")
        assert not outcome.failures, outcome.failures
        return outcome

    async def ask(self, *asks: Ask) -> list[Outcome]:
        """Run requests together and wait for all of them; prefill hears of those only that decode may not compute."""
        for ask in asks:
            await (self.reserve(ask) if ask.local else self.begin(ask))
        return list(await asyncio.gather(*(self.finish(ask) for ask in asks)))


async def ask_commits(stub: Any, *calls: decode_pb2.CommitCall) -> list[decode_pb2.CommitAnswer]:
    """Ask decode on a stream of their own; the answers in order."""
    stream = stub.Commits(timeout=WAIT_S)
    for call in calls:
        await stream.write(call)
    answers = [await stream.read() for _ in calls]
    stream.cancel()
    return answers
