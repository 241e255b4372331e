"""Sends a run's requests, in a closed loop or at their times, and records what became of each.

One process, one event loop, messages built before the first is sent: the generator shares its cores with the server.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import gc
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tandem.bench.load.http_client import BROKEN, NO_SOCKET, TIMED_OUT, UNFINISHED, UNREACHABLE, LoadClient, Outcome
from tandem.bench.load.records import RequestRecord, TokenSource
from tandem.bench.load.stream_log import StreamLog, error_message
from tandem.bench.load.workload import Job

PATH = "/v1/completions"
_OK = 200

#: Kinds of failures. One by its HTTP status is `http_<status>`.
FAILURES = {
    NO_SOCKET: "no_socket",
    BROKEN: "broken",
    UNFINISHED: "unfinished",
    TIMED_OUT: "timeout",
    UNREACHABLE: "unreachable",
}
INTERRUPTED = "interrupted"  # by us
NO_STREAM, NO_TOKEN = "no_stream", "no_token"


@dataclass
class Load:
    """What was sent, and what came of it."""

    records: list[RequestRecord] = field(default_factory=list)
    duration_s: float = 0.0
    cpu_s: float = 0.0  # of this process, user and system
    is_partial: bool = False  # it was stopped before its end
    num_unsent: int = 0  # turns of conversations that ended before, by a failure or as all was stopped
    server: str = ""  # how the server names itself

    @property
    def cpu_share(self) -> float:
        """CPU seconds for each second: 1 is one core."""
        return self.cpu_s / self.duration_s if self.duration_s else 0.0


class Driver:
    """Sends one run, and keeps what becomes of it. Each driver serves once."""

    def __init__(self, client: LoadClient, on_record: Callable[[RequestRecord], None]) -> None:
        """`on_record` hears of each request that has ended."""
        self._client = client
        self._on_record = on_record
        self._stopped = asyncio.Event()
        self._began_s = self._cpu_s = 0.0
        self._freezes = False
        self._load = Load()

    def stop(self) -> None:
        """Send no more, and break off what is under way."""
        self._stopped.set()
        self._client.close()

    async def closed_loop(self, concurrency: int) -> Load:
        """`concurrency` clients that each wait for an answer before what comes next."""
        raise NotImplementedError

    async def open_loop(self, arrivals_s: Sequence[float]) -> Load:
        """What comes begins at its time, in seconds from the beginning; nobody waits for an answer before."""
        raise NotImplementedError

    def _begin(self) -> None:
        # What was made so far is not looked at again: a collection of all of it in mid-run would show as latency. In a
        # process that has put by what it held when it was ready, that stays so, and little is left to look at.
        self._freezes = not gc.get_freeze_count()
        gc.collect()
        if self._freezes:
            gc.freeze()
        self._cpu_s = time.process_time()
        self._began_s = time.monotonic()

    def _end(self) -> Load:
        if self._freezes:
            gc.unfreeze()
        load = self._load
        load.duration_s = time.monotonic() - self._began_s
        load.cpu_s = time.process_time() - self._cpu_s
        load.is_partial = self._stopped.is_set()
        load.records.sort(key=lambda record: record.number)
        return load

    async def _sleep(self, delay_s: float) -> None:
        """For `delay_s`, or until all is stopped."""
        try:
            async with asyncio.timeout(delay_s):
                await self._stopped.wait()
        except TimeoutError:
            return

    def _keep(self, job: Job, planned_s: float | None, outcome: Outcome) -> RequestRecord:
        is_ours = self._stopped.is_set() and outcome.status == BROKEN
        record = record_of(job, outcome, began_s=self._began_s, planned_s=planned_s, was_interrupted=is_ours)
        self._load.records.append(record)
        self._load.server = outcome.server or self._load.server
        self._on_record(record)
        return record


class LoadDriver(Driver):
    """Sends the jobs of one run."""

    def __init__(
        self,
        client: LoadClient,
        jobs: Sequence[Job],
        bodies: Sequence[bytes],
        on_record: Callable[[RequestRecord], None] = lambda _: None,
    ) -> None:
        """`bodies` are the jobs' requests."""
        super().__init__(client, on_record)
        self._jobs = jobs
        self._messages = [client.message("POST", PATH, body) for body in bodies]

    async def closed_loop(self, concurrency: int) -> Load:
        """`concurrency` clients that each wait for an answer before the next request."""
        numbers = iter(range(len(self._jobs)))

        async def client() -> None:
            for number in numbers:  # shared: each takes the next
                if self._stopped.is_set():
                    return
                self._keep(self._jobs[number], None, await self._client.request(self._messages[number]))

        self._begin()
        await asyncio.gather(*(client() for _ in range(min(concurrency, len(self._jobs)))))
        return self._end()

    async def open_loop(self, arrivals_s: Sequence[float]) -> Load:
        """Each job at its time, in seconds from the beginning; nobody waits for an answer before sending."""
        self._begin()
        for number, arrival_s in enumerate(arrivals_s):
            delay_s = self._began_s + arrival_s - time.monotonic()
            # Zero too: answers are read between the requests of a burst.
            await self._sleep(max(0.0, delay_s))
            if self._stopped.is_set():
                break
            self._client.send(self._messages[number], functools.partial(self._keep, self._jobs[number], arrival_s))
        await self._client.wait_none_under_way(None)
        return self._end()


def record_of(
    job: Job, outcome: Outcome, *, began_s: float, planned_s: float | None = None, was_interrupted: bool = False
) -> RequestRecord:
    """The record of `job`; the outcome's times become seconds from `began_s`."""
    failure, message = (INTERRUPTED, "") if was_interrupted else _failure(outcome)
    common = RequestRecord(
        number=job.number,
        num_input_asked=len(job.prompt_ids) or None,
        num_output_asked=job.num_output,
        sent_s=outcome.sent_s - began_s,
        ended_s=outcome.ended_s - began_s,
        planned_s=planned_s,
        num_repeated=job.num_repeated,
        turn=job.turn,
        failure=failure,
        message=message,
        request_id=outcome.request_id,
    )
    stream = outcome.stream
    if failure is not None or stream is None:
        return common
    num_output, source = _num_output(job, stream)
    return dataclasses.replace(
        common,
        event_s=tuple(event_s - began_s for event_s in stream.event_s),
        num_input=stream.num_prompt_tokens,
        num_cached=stream.num_cached_tokens,
        num_output=num_output,
        token_source=source,
        digest=stream.digest,
        own_s=outcome.own_s,
    )


def _num_output(job: Job, stream: StreamLog) -> tuple[int, TokenSource]:
    """By the server's usage; else by the limit, where that ended it; else a token for each event."""
    if stream.num_output_tokens is not None:
        return stream.num_output_tokens, "usage"
    if stream.finish_reason == "length":
        return job.num_output, "limit"
    return len(stream.event_s), "events"


def _failure(outcome: Outcome) -> tuple[str | None, str]:
    """Kind and message; a kind of `None` is none."""
    if outcome.status in FAILURES:
        return FAILURES[outcome.status], outcome.why
    if outcome.status != _OK:
        return f"http_{outcome.status}", answer_error(outcome)
    if outcome.stream is None:
        return NO_STREAM, "the answer is no text/event-stream"
    if not outcome.stream.event_s:
        return NO_TOKEN, "the stream ended without a token"
    return None, ""


def answer_error(outcome: Outcome) -> str:
    """What the body of a refusal says."""
    try:
        return error_message(json.loads(outcome.body))
    except ValueError:
        return outcome.body[:200].decode(errors="replace")
