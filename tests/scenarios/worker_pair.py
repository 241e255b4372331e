"""One prefill and one decode worker as objects in the test's own process, and a router that does what a test says.

Everything between the two is real: threads, gRPC, the UCX transport, a small model with random weights. Only the
router is a script, so that each message can come, stay away or come twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import pytest
import pytest_asyncio
import torch
from transformers import AutoModelForCausalLM

from decode_worker.worker import DecodeWorker
from kvtransfer.protocol.grants import GrantState
from kvtransfer.protocol.messages import AttemptKey
from prefill_worker.worker import PrefillWorker
from tandem.core.config import from_dict
from tandem.core.sampling import SamplingParams
from tandem.rpc.channel import make_channel
from tandem.rpc.convert import sampling_to_proto
from tandem.rpc.v1 import common_pb2 as pb
from tandem.rpc.v1 import decode_pb2, prefill_pb2
from tandem.rpc.v1.decode_pb2_grpc import DecodeServiceStub
from tandem.rpc.v1.prefill_pb2_grpc import PrefillServiceStub
from tandem.worker.process import WorkerProcess
from tandem.worker.scheduler import SchedulerLimits
from tools.make_random_model import ModelSpec, save

PAGE = 16
VOCAB = 320
WAIT_S = 10.0
SETTLE_S = 3.0
CONFIG: dict[str, Any] = {
    "cache": {"page_size": PAGE},
    "scheduling": {"chunk_size": 32, "max_num_batched_tokens": 128, "max_num_seqs": 16},
}
_T = TypeVar("_T")
Worker = TypeVar("Worker", bound=WorkerProcess)


def save_llama(directory: Path) -> Path:
    """A checkpoint of three layers whose attention matters."""
    return save(ModelSpec(std=0.2, layers=3, max_positions=512, seed=1), directory)


def make_worker(cls: type[Worker], model_dir: Path, num_pages: int, config: dict[str, Any], name: str = "") -> Worker:
    """A worker that has not been started."""
    page_bytes = 3 * 2 * PAGE * 2 * 16 * 4  # layers, K and V, slots, heads, head size, float32
    worker_id = name or f"{cls.role}-0"
    return cls(
        from_dict(config),
        worker_id=worker_id,
        incarnation=f"{worker_id}-{time.monotonic_ns()}",
        model_dir=model_dir,
        kv_bytes=num_pages * page_bytes,
        num_threads=1,
    )


async def until(condition: Callable[[], object], what: str, timeout_s: float = WAIT_S) -> None:
    """Until `condition()` holds: what other threads do can only be looked at."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come within {timeout_s} s"
        await asyncio.sleep(0.002)


class Gate:
    """Stands in for a function and holds its callers, from call number `first` on, until it is opened."""

    def __init__(self, owner: Any, name: str, first: int = 0) -> None:
        self._owner, self._name, self._first = owner, name, first
        self._inner = getattr(owner, name)
        self.num_calls = 0
        self.reached = threading.Event()
        self._open = threading.Event()

    def __enter__(self) -> Gate:
        setattr(self._owner, self._name, self)
        return self

    def __exit__(self, *_: object) -> None:
        self.open()
        if vars(self._owner).get(self._name) is self:
            setattr(self._owner, self._name, self._inner)

    def __call__(self, *args: Any, **options: Any) -> Any:
        self.num_calls += 1
        if self.num_calls > self._first:
            self.reached.set()
            assert self._open.wait(WAIT_S), f"{self._name} was held for too long"
        return self._inner(*args, **options)

    def open(self) -> None:
        self._open.set()

    async def wait(self) -> None:
        await until(self.reached.is_set, f"a call of {self._name}")


class Stash(Gate):
    """As `Gate`, for functions that return nothing: calls are put aside instead of holding their threads."""

    def __init__(self, owner: Any, name: str, first: int = 0) -> None:
        super().__init__(owner, name, first)
        self._lock = threading.Lock()
        self._kept: list[tuple[Any, Any]] = []
        self._is_open = False

    def __call__(self, *args: Any, **options: Any) -> None:
        with self._lock:
            self.num_calls += 1
            if not self._is_open and self.num_calls > self._first:
                self._kept.append((args, options))
                self.reached.set()
                return
        self._inner(*args, **options)

    @property
    def first_argument(self) -> Any:
        """Of the first call that is kept."""
        return self._kept[0][0][0]

    def open(self) -> None:
        with self._lock:
            self._is_open = True
            kept, self._kept = self._kept, []
        for args, options in kept:
            self._inner(*args, **options)


@dataclass
class WorkerPair:
    """Both workers, running."""

    prefill: PrefillWorker
    decode: DecodeWorker

    def stop(self) -> None:
        self.prefill.stop()
        self.decode.stop()

    def on_runner(self, worker: WorkerProcess, call: Callable[[], _T]) -> _T:
        """Run `call` where the pool and the scheduler live, between two steps."""
        done: Future[_T] = Future()

        def run() -> None:
            try:
                done.set_result(call())
            except Exception as error:  # noqa: BLE001 - the caller's
                done.set_exception(error)

        worker.runner.submit(run)
        return done.result(WAIT_S)

    def limit(self, worker: WorkerProcess, **changes: int) -> SchedulerLimits:
        """Change the bounds of a worker's batches; returns the old ones."""
        old = worker.scheduler.limits
        worker.scheduler.limits = replace(old, **changes)
        return old

    def drop_caches(self) -> None:
        for worker in (self.prefill, self.decode):
            self.on_runner(worker, worker.pool.drop_cache)

    @contextlib.contextmanager
    def hogged(self, worker: WorkerProcess, num_free: int) -> Iterator[None]:
        """Leave only `num_free` pages of a worker's pool."""
        pool = worker.pool
        self.on_runner(worker, pool.drop_cache)
        pages = self.on_runner(worker, lambda: pool.allocate(pool.num_available - num_free))
        assert pages is not None
        try:
            yield
        finally:
            self.on_runner(worker, lambda: pool.release(pages))

    def leftovers(self) -> list[str]:
        """What is still held of any request, in words; nothing when both workers are at rest."""
        left = []
        for worker in (self.prefill, self.decode):
            counts = self.on_runner(worker, worker.pool.counts)
            self.on_runner(worker, worker.pool.check)
            if counts.used or counts.reserved or counts.quarantined:
                left.append(f"{worker.worker_id}: {counts}")
            scheduler = worker.scheduler
            if scheduler.running or scheduler.waiting:
                left.append(f"{worker.worker_id}: {scheduler.running} {scheduler.waiting}")
        prefill, decode = self.prefill, self.decode
        held = {
            "prompts": prefill.prompts.jobs,
            "handoffs": prefill.desk._entries,
            "targets": prefill._targets,
            "confirmations": prefill._confirming,
            "generations": decode.generations.jobs,
            "grants": decode.generations.reservations.granted,
            "reservations": decode.generations.reservations.waiting,
        }
        return left + [f"{name}: {list(map(str, what))}" for name, what in held.items() if what]

    async def settled(self, timeout_s: float = SETTLE_S) -> None:
        """Until nothing is held; then all pages are where they were, and every invariant of the pools holds."""
        loop = asyncio.get_running_loop()
        deadline = time.monotonic() + timeout_s
        while left := await loop.run_in_executor(None, self.leftovers):
            assert time.monotonic() < deadline, f"still held after {timeout_s} s: {left}"
            await asyncio.sleep(0.01)


@contextlib.contextmanager
def running_pair(
    model_dir: Path, *, prefill_pages: int = 128, decode_pages: int = 128, config: dict[str, Any] | None = None
) -> Iterator[WorkerPair]:
    config = config or CONFIG
    prefill = make_worker(PrefillWorker, model_dir, prefill_pages, config)
    decode = make_worker(DecodeWorker, model_dir, decode_pages, config)
    try:
        prefill.start()
        decode.start()
        yield WorkerPair(prefill, decode)
    finally:
        prefill.stop()
        decode.stop()


@dataclass
class Ask:
    """A request as the router has it."""

    prompt: list[int]
    params: SamplingParams = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)  # noqa: RUF009 - frozen
    n: int = 1
    request_id: str = ""
    attempt: int = 1
    priority: int = 0
    journal: tuple[pb.ChoiceJournal, ...] = ()

    @property
    def key(self) -> AttemptKey:
        return AttemptKey(self.request_id, self.attempt)


@dataclass
class Outcome:
    """What a router has heard of one attempt."""

    tokens: dict[int, dict[int, int]] = field(default_factory=lambda: defaultdict(dict))  # choice → index → id
    finished: dict[int, int] = field(default_factory=dict)  # choice → finish reason
    kinds: list[str] = field(default_factory=list)  # of all other events, with their side: "decode.granted"
    grant: decode_pb2.Grant | None = None
    done: prefill_pb2.HandoffDone | None = None
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
        self.infos: dict[str, pb.WorkerInfo] = {}
        self.statuses: dict[str, pb.WorkerStatus] = {}
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
            channel = self._channels[side] = make_channel(worker.info.address)
            self._calls[side] = stubs[side](channel).Session()
            self._may_read[side].set()
            self._readers.append(asyncio.create_task(self._read(side)))
        await self.until(lambda: len(self.infos) == 2, "both hellos")
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
        key = AttemptKey(message.request_id, message.attempt)
        outcome = self.outcomes[key]
        if kind in ("token", "first_token"):
            known = outcome.tokens[message.choice].setdefault(message.index, message.token_id)
            assert known == message.token_id, f"{key} choice {message.choice} index {message.index} came twice"
            if message.finish_reason:
                outcome.finished[message.choice] = message.finish_reason
            return
        outcome.kinds.append(f"{side}.{kind}")
        if kind == "granted":
            outcome.grant = message
            if self.attaches:
                await self.attach(self._asks[key])
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
        await self.say("decode", reserve=decode_pb2.Reserve(**self._common(ask)))
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
            "prompt_ids": ask.prompt,
            "sampling": sampling_to_proto(ask.params),
            "num_choices": ask.n,
            "journal": ask.journal,
        }

    async def attach(self, ask: Ask, grant: decode_pb2.Grant | None = None) -> None:
        grant = grant or self.outcomes[ask.key].grant
        attach = prefill_pb2.AttachGrant(request_id=ask.request_id, attempt=ask.attempt, grant=grant)
        await self.say("prefill", attach=attach)

    async def until_attached(self, ask: Ask) -> None:
        """Until decode has taken prefill as the grant's writer."""

        def is_open() -> bool:
            record = self._pair.decode.desk._handoffs.record(ask.key)
            return record is not None and record.state is GrantState.OPEN

        await until(is_open, f"an attached grant of {ask.key}")

    async def cancel(self, ask: Ask, *sides: str) -> None:
        for side in sides or ("prefill", "decode"):
            await self.say(side, cancel=pb.Cancel(request_id=ask.request_id, attempt=ask.attempt, reason="test"))

    async def begin(self, ask: Ask) -> Ask:
        """Start and reserve, as a real router does: prefill hears of the prompt before it gets the grant."""
        await self.start(ask)
        return await self.reserve(ask)

    async def finish(self, ask: Ask) -> Outcome:
        """Until every choice has ended; a failure of either side fails the test."""
        outcome = self.outcomes[ask.key]
        num_wanted = ask.n - sum(j.finished for j in ask.journal)

        def over() -> bool:
            return len(outcome.finished) >= num_wanted or bool(outcome.failures)

        await self.until(over, f"the end of {ask.key}")
        assert not outcome.failures, outcome.failures
        return outcome

    async def ask(self, *asks: Ask) -> list[Outcome]:
        """Run requests together and wait for all of them."""
        for ask in asks:
            await self.begin(ask)
        return list(await asyncio.gather(*(self.finish(ask) for ask in asks)))


class Oracle:
    """The same checkpoint in transformers itself: float32, eager attention."""

    def __init__(self, model_dir: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(
            model_dir, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        self._model.generation_config.eos_token_id = None

    def greedy(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        ids = torch.tensor([list(prompt)])
        with torch.no_grad():
            out = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=num_tokens,
                do_sample=False,
                pad_token_id=0,
            )
        return list(out[0, len(prompt) :].tolist())


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """Random tokens, none of them special."""
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return list((torch.randint(2, VOCAB, (length,), generator=generator)).tolist())


# ---- fixtures, for modules that say `pytest_plugins = ["tests.scenarios.worker_pair"]` and take `SHARED_LOOP`: gRPC's
# events of a loop that a test has closed would get lost for the loops of the workers, which live in this process too.

SHARED_LOOP = pytest.mark.asyncio(loop_scope="session")


@pytest.fixture(scope="session")
def worker_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("llama") / "model")


@pytest.fixture(scope="session")
def shared_pair(worker_model_dir: Path) -> Iterator[WorkerPair]:
    with running_pair(worker_model_dir) as pair:
        yield pair


@pytest_asyncio.fixture(loop_scope="session")
async def pair(shared_pair: WorkerPair) -> AsyncIterator[WorkerPair]:
    """The shared pair with empty prefix caches; the test fails when it leaves anything behind."""
    shared_pair.drop_caches()
    yield shared_pair
    await shared_pair.settled()


@pytest.fixture(scope="session")
def oracle(worker_model_dir: Path) -> Oracle:
    return Oracle(worker_model_dir)
