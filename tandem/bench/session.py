"""One measuring session against one server: look at it, warm it up, measure, once or at many rates."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import signal
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tandem.bench.load.conversations import ConversationPlan, make_conversations
from tandem.bench.load.converse import ConversationDriver
from tandem.bench.load.drive import Driver, Load, LoadDriver
from tandem.bench.load.http_client import LoadClient
from tandem.bench.load.records import RequestRecord
from tandem.bench.load.trace_entry import TraceEntry
from tandem.bench.load.traces import Cut, cut_to
from tandem.bench.load.workload import Job, body_of, make_jobs, poisson_arrivals, warm_up_jobs
from tandem.bench.server import FirstRequest, ServedModel, connected, one_token
from tandem.core.client_key import api_key
from tandem.core.errors import ConfigError, TandemError

_WARM_UP_CONCURRENCY = 4


@dataclass(frozen=True)
class Target:
    """Which server, and how it is asked."""

    url: str
    model: str | None = None  # `None`: the first that it serves
    ignore_eos: bool = True
    timeout_s: float = 600.0  # of one answer
    max_sockets: int = 4096


@dataclass(frozen=True)
class Workload:
    """What it is asked."""

    entries: Sequence[TraceEntry]
    vocabulary: Sequence[int]
    seed: int = 1
    num_warm_up: int = 2
    max_len: int | None = None  # longer requests are cut to it; 0: to the server's context; `None`: they are refused
    plan: ConversationPlan | None = None  # conversations are held; then `entries` tells how many turns, and how long

    @classmethod
    def of_conversations(cls, plan: ConversationPlan, *, seed: int = 1, num_warm_up: int = 2) -> Workload:
        """Turns are at least as long as they have words."""
        turn = plan.num_words + plan.num_output
        entries = [TraceEntry(turn * number + plan.num_words, plan.num_output) for number in range(plan.num_turns)]
        return cls(entries * plan.num, (), seed, num_warm_up, plan=plan)

    @property
    def num_arriving(self) -> int:
        """Requests, or conversations, that come by themselves."""
        return len(self.entries) if self.plan is None else self.plan.num


@dataclass(frozen=True)
class Shape:
    """When it is asked: in a closed loop, at a Poisson process's times, or (neither is given) at the trace's own."""

    concurrency: int | None = None
    rate: float | None = None

    @property
    def name(self) -> str:
        return "closed" if self.concurrency else "poisson" if self.rate else "trace"


#: Hears of each record; says whether the run goes on.
Watcher = Callable[[RequestRecord], bool]
MakeDriver = Callable[[LoadClient, Callable[[RequestRecord], None]], Driver]


class Session:
    """Several runs against one server. SIGINT during a run ends it in order; `was_interrupted` tells."""

    def __init__(self, target: Target, workload: Workload) -> None:
        self.target, self.workload = target, workload
        self.served = ServedModel("", None, "")
        self.cut: Cut | None = None  # what did not fit
        self.was_interrupted = False

    async def open(self) -> None:
        """Look at the server and warm it up.

        Raises:
            ConfigError: as `connected`; or a request is longer than the server's context.
            TandemError: a request to warm up failed.
            KeyboardInterrupt: SIGINT came before there was anything to report.
        """
        client = self.client()
        try:
            self.served = await connected(client, self.target.url, self.target.model, first=self._first_request())
        finally:
            client.close()
        self._cut()
        self._check_lengths()
        await self._warm_up()

    def check(self, shape: Shape) -> None:
        """Raises `ConfigError` where `shape` takes times from a load that has none."""
        if shape.name == "trace" and any(entry.arrival_s is None for entry in self.workload.entries):
            raise ConfigError("this load has no arrival times: give --rate or --concurrency", key="--rate")

    async def measure(
        self, shape: Shape, *, number: int = 0, limit: int | None = None, watch: Watcher = lambda _: True
    ) -> Load:
        """One run. Each `number` has prompts of its own, and the same lengths and pattern of arrivals.

        It ends early, and is then partial, when `watch` returns `False` or on SIGINT.

        Args:
            limit: only the first so many of the workload's requests, which hold no conversations.
        """
        workload = dataclasses.replace(self.workload, entries=self.workload.entries[:limit])
        make = self._make_driver(workload, f"{workload.seed}:{number}")
        if shape.concurrency is not None:
            concurrency = shape.concurrency
            return await self._drive(make, watch, lambda driver: driver.closed_loop(concurrency))
        arrivals_s = self._arrivals_s(workload, shape)
        return await self._drive(make, watch, lambda driver: driver.open_loop(arrivals_s))

    def _arrivals_s(self, workload: Workload, shape: Shape) -> list[float]:
        if shape.rate is not None:
            return poisson_arrivals(workload.num_arriving, shape.rate, str(workload.seed))
        self.check(shape)
        return [entry.arrival_s for entry in workload.entries if entry.arrival_s is not None]

    async def _warm_up(self) -> None:
        if not self.workload.num_warm_up:
            return
        make = self._make_warm_up()
        load = await self._drive(make, lambda _: True, lambda driver: driver.closed_loop(_WARM_UP_CONCURRENCY))
        if self.was_interrupted:
            raise KeyboardInterrupt
        for record in load.records:
            if not record.is_good:
                raise TandemError(f"a request to warm up failed ({record.failure}): {record.message}")

    def _first_request(self) -> FirstRequest:
        if self.workload.plan is None:
            return one_token(self.workload.vocabulary, ignore_eos=self.target.ignore_eos)
        plan = dataclasses.replace(self.workload.plan, num=1, num_turns=1, num_words=1, num_output=1)
        (conversation,) = make_conversations(plan, "first")
        return lambda model: (conversation.path, conversation.body(model, ignore_eos=self.target.ignore_eos))

    def _make_driver(self, workload: Workload, seed: str) -> MakeDriver:
        if workload.plan is not None:
            return self._converse(workload.plan, seed)
        return self._send(make_jobs(workload.entries, vocabulary=workload.vocabulary, seed=seed))

    def _make_warm_up(self) -> MakeDriver:
        workload, seed = self.workload, str(self.workload.seed)
        if workload.plan is not None:
            plan = dataclasses.replace(workload.plan, num=workload.num_warm_up, num_turns=1)
            return self._converse(plan, f"{seed}:warm-up")
        first = make_jobs(workload.entries[:1], vocabulary=workload.vocabulary, seed=seed)[0]
        return self._send(warm_up_jobs(workload.num_warm_up, first, vocabulary=workload.vocabulary, seed=seed))

    def _converse(self, plan: ConversationPlan, seed: str) -> MakeDriver:
        conversations, name, ignore_eos = make_conversations(plan, seed), self.served.name, self.target.ignore_eos
        return lambda client, on_record: ConversationDriver(
            client, conversations, name, on_record, ignore_eos=ignore_eos
        )

    def _send(self, jobs: Sequence[Job]) -> MakeDriver:
        bodies = [body_of(job, self.served.name, ignore_eos=self.target.ignore_eos) for job in jobs]
        return lambda client, on_record: LoadDriver(client, jobs, bodies, on_record)

    async def _drive(
        self, make: MakeDriver, watch: Watcher, run: Callable[[Driver], Coroutine[Any, Any, Load]]
    ) -> Load:
        client = self.client()

        def on_record(record: RequestRecord) -> None:
            if not watch(record):
                driver.stop()

        driver = make(client, on_record)
        try:
            with self.interruptible(driver.stop):
                return await run(driver)
        finally:
            client.close()

    @contextlib.contextmanager
    def interruptible(self, stop: Callable[[], None]) -> Iterator[None]:
        """Inside, SIGINT calls `stop` and is remembered."""

        def interrupt() -> None:
            self.was_interrupted = True
            loop.remove_signal_handler(signal.SIGINT)  # a second one ends the process
            stop()

        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, interrupt)
        try:
            yield
        finally:
            loop.remove_signal_handler(signal.SIGINT)

    def client(self) -> LoadClient:
        """One for the target, to be closed by whom it is given."""
        target = self.target
        return LoadClient(target.url, max_sockets=target.max_sockets, api_key=api_key(), timeout_s=target.timeout_s)

    def _cut(self) -> None:
        workload, max_len = self.workload, self.workload.max_len
        if max_len is None:
            return
        if max_len == 0:
            max_len = self.served.max_model_len or 0
        if max_len < 2:
            raise ConfigError("the server does not say how long its context is; give its tokens to --cut", key="--cut")
        entries, self.cut = cut_to(workload.entries, max_len)
        self.workload = dataclasses.replace(workload, entries=entries)

    def _check_lengths(self) -> None:
        limit = self.served.max_model_len
        if limit is None:
            return
        too_long = [entry for entry in self.workload.entries if entry.num_input + entry.num_output > limit]
        if too_long and self.workload.plan is not None:
            raise ConfigError(
                f"conversations become longer than the context of {limit} tokens: take fewer --turns, or a shorter "
                "--input-len or --output-len",
                key="--turns",
            )
        if too_long:
            raise ConfigError(
                f"{len(too_long)} of {len(self.workload.entries)} requests are longer than the context of {limit} "
                "tokens; scale them down with --scale-lengths, or cut them with --cut",
                key="--scale-lengths",
            )
