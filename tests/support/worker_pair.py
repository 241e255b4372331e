"""One prefill and one decode worker as objects in the test's own process, and a router that does what a test says.

Everything between the two is real: threads, gRPC, the UCX transport, a small model with random weights. Only the
router is a script, so that each message can come, stay away or come twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import pytest
import pytest_asyncio
import torch
from transformers import AutoModelForCausalLM

from decode_worker.worker import DecodeWorker
from prefill_worker.worker import PrefillWorker
from tandem.core.config import from_dict
from tandem.core.sampling import SamplingParams
from tandem.engine.random_model import ModelSpec, save
from tandem.worker.batch import SchedulerLimits
from tandem.worker.parts import WorkerPlace
from tandem.worker.process import WorkerProcess
from tandem.worker.scheduler import BatchScheduler
from tandem.worker.step_engine import StepEngine
from tests.support.waiting import nothing, until

PAGE = 16
VOCAB = 320
WAIT_S = 60.0
SETTLE_S = 9.0  # less than a lease and its grace
CONFIG: dict[str, Any] = {
    "cache": {"page_size": PAGE},
    "scheduling": {"chunk_size": 32, "max_num_batched_tokens": 128, "max_num_seqs": 16},
}
_T = TypeVar("_T")
Worker = TypeVar("Worker", PrefillWorker, DecodeWorker)
AnyWorker = PrefillWorker | DecodeWorker


def save_llama(directory: Path) -> Path:
    """A checkpoint of three layers whose attention matters."""
    return save(ModelSpec(std=0.2, layers=3, max_positions=512, seed=1), directory)


def make_worker(
    cls: type[Worker],
    model_dir: Path,
    num_pages: int,
    config: dict[str, Any],
    name: str = "",
    engine: StepEngine | None = None,
) -> WorkerProcess[Worker]:
    """A worker that has not been started; with the engine of an earlier life, if given."""
    page_bytes = 3 * 2 * PAGE * 2 * 16 * 4  # layers, K and V, slots, heads, head size, float32
    worker_id = name or f"{cls.role}-0"
    place = WorkerPlace(
        worker_id=worker_id,
        incarnation=f"{worker_id}-{time.monotonic_ns()}",
        model_dir=model_dir,
        kv_bytes=num_pages * page_bytes,
        num_threads=1,
    )
    return WorkerProcess(cls, from_dict(config), place, engine)


class Gate:
    """Stands in for a function and holds its callers, from call number `first` on, until it is opened.

    Only calls that find `when()` true, asked in the caller's thread.
    """

    def __init__(self, owner: Any, name: str, first: int = 0, when: Callable[[], bool] = lambda: True) -> None:
        self._owner, self._name, self._first, self._when = owner, name, first, when
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
        if self.num_calls > self._first and self._when():
            self.reached.set()
            assert self._open.wait(WAIT_S), f"{self._name} was held for too long"
        return self._inner(*args, **options)

    def open(self) -> None:
        self._open.set()

    def close(self) -> None:
        """From the next call on."""
        self._first = self.num_calls

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
            self._let_go(args, options)

    def _let_go(self, args: Any, options: Any) -> None:
        self._inner(*args, **options)


class HeldCommits(Stash):
    """Commits of a prefill worker. Opened, it sends those of attempts that go on, from the thread that sends them."""

    def __init__(self, prefill: PrefillWorker) -> None:
        super().__init__(prefill, "commit")
        self._prefill = prefill

    def _let_go(self, args: Any, options: Any) -> None:
        def send(_: Any) -> None:
            if args[0].key in self._prefill.driver._entries:
                self._inner(*args, **options)

        self._prefill.parts.on_transfer(send)


@dataclass
class WorkerPair:
    """Both workers, running."""

    prefill_process: WorkerProcess[PrefillWorker]
    decode_process: WorkerProcess[DecodeWorker]

    @property
    def prefill(self) -> PrefillWorker:
        return self.prefill_process.worker

    @property
    def decode(self) -> DecodeWorker:
        return self.decode_process.worker

    def stop(self) -> None:
        self.prefill_process.stop()
        self.decode_process.stop()

    def on_runner(self, worker: AnyWorker, call: Callable[[], _T]) -> _T:
        """Run `call` where the pool and the scheduler live, between two steps."""
        done: Future[_T] = Future()

        def run() -> None:
            try:
                done.set_result(call())
            except Exception as error:  # noqa: BLE001 - the caller's
                done.set_exception(error)

        worker.parts.runner.submit(run)
        return done.result(WAIT_S)

    def limit(self, worker: AnyWorker, **changes: int) -> SchedulerLimits:
        """Change the bounds of a worker's batches; returns the old ones."""
        old = worker.parts.scheduler.limits
        worker.parts.scheduler.limits = replace(old, **changes)
        return old

    def drop_caches(self) -> None:
        for worker in (self.prefill, self.decode):
            self.on_runner(worker, worker.parts.pool.drop_cache)

    @contextlib.contextmanager
    def hogged(self, worker: AnyWorker, num_free: int) -> Iterator[None]:
        """Leave only `num_free` pages of a worker's pool."""
        pool = worker.parts.pool
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
            counts = self.on_runner(worker, worker.parts.pool.counts)
            self.on_runner(worker, worker.parts.pool.check)
            if counts.used or counts.reserved or counts.quarantined:
                left.append(f"{worker.parts.worker_id}: {counts}")
            load = worker.parts.load.newest
            if load.num_running or load.num_queued or load.num_queued_tokens or load.num_incoming:
                left.append(f"{worker.parts.worker_id}: {load}")
            scheduler = worker.parts.scheduler
            if scheduler.running or scheduler.waiting or scheduler.parked:
                left.append(f"{worker.parts.worker_id}: {scheduler.running} {scheduler.waiting} {scheduler.parked}")
        prefill, decode = self.prefill, self.decode
        held: dict[str, Collection[Any]] = {
            "prompts": prefill.core.jobs,
            "handoffs": prefill.driver._entries,
            "targets": prefill._targets,
            "confirmations": prefill._confirming,
            "attempts at decode": decode.core.ledger.attempts,
            "reservations": decode.core.ledger.waiting,
        }
        return left + [f"{name}: {list(map(str, what))}" for name, what in held.items() if what]

    async def settled(self, timeout_s: float = SETTLE_S) -> None:
        """Until nothing is held; then all pages are where they were, and every invariant of the pools holds."""
        await until(lambda: asyncio.to_thread(self.leftovers), "rest", timeout_s, wanted=nothing)


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


@contextlib.contextmanager
def counted(pair: WorkerPair, computed: int, cached: int) -> Iterator[None]:
    """Decode computes, and finds in its cache, exactly so many prompt tokens meanwhile."""
    worker = pair.decode
    before = (worker.parts.counters.num_prompt_tokens_computed, worker.parts.counters.num_prompt_tokens_cached)
    yield
    after = (worker.parts.counters.num_prompt_tokens_computed, worker.parts.counters.num_prompt_tokens_cached)
    assert (after[0] - before[0], after[1] - before[1]) == (computed, cached)


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

    def logprobs(self, prompt: Sequence[int]) -> torch.Tensor:
        """`[len(prompt) - 1, vocab]`: the distribution of each token of a prompt but the first."""
        with torch.no_grad():
            logits = self._model(torch.tensor([list(prompt)])).logits[0, :-1]
        return torch.log_softmax(logits, dim=-1)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """Random tokens, none of them special."""
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return list((torch.randint(2, VOCAB, (length,), generator=generator)).tolist())


# ---- fixtures, for modules that say `pytest_plugins = ["tests.support.worker_pair"]` and take `SHARED_LOOP`: gRPC's
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


@contextlib.contextmanager
def most_held(scheduler: BatchScheduler) -> Iterator[dict[str, int]]:
    """The most pages of a worker that are in use or reserved at the end of a step meanwhile."""
    seen, apply = {"pages": 0}, scheduler.apply

    def watched(*step: Any) -> None:
        apply(*step)
        counts = scheduler.pool.counts()
        seen["pages"] = max(seen["pages"], counts.used + counts.reserved)

    scheduler.apply = watched  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        scheduler.apply = apply  # type: ignore[method-assign]


def params(max_tokens: int = 12, **given: Any) -> SamplingParams:
    """Of the likeliest tokens, as many as may come, unless something else is given."""
    return SamplingParams(**({"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True} | given))
