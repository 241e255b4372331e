"""Whether a server has nothing to do: it then answers a request alone as fast as it did when it was started."""

from __future__ import annotations

import asyncio
import contextlib
import statistics
from collections.abc import AsyncIterator, Sequence
from dataclasses import astuple, dataclass, field

from tandem.bench.load.drive import PATH, record_of
from tandem.bench.load.http_client import LoadClient
from tandem.bench.load.records import RequestRecord
from tandem.bench.load.stream_log import StreamLog
from tandem.bench.load.workload import Job, body_of, fixed_lengths, make_jobs
from tandem.bench.server import connected
from tandem.core.errors import TandemError

_NUM_INPUT, _NUM_OUTPUT = 16, 8
_NUM_ALONE = 7  # rounds whose medians tell how fast they are alone
_ANSWER_S = 60.0
_SETTLE_S = 60.0
#: A step of a batch that is still under way makes a token wait longer than this.
_FACTOR, _SLACK_S = 2.0, 0.005


@dataclass(frozen=True)
class Pace:
    """Of the slowest of some requests that were sent at once: its TTFT, and the longest gap between two events."""

    ttft_s: float
    gap_s: float

    @classmethod
    def of(cls, records: Sequence[RequestRecord]) -> Pace:
        """Of at least one that succeeded."""
        gaps = [gap_s for record in records for gap_s in record.itl_s]
        return cls(max(record.ttft_s for record in records), max(gaps, default=0.0))

    @classmethod
    def usual(cls, paces: Sequence[Pace]) -> Pace:
        """The medians of at least one."""
        ttft_s, gap_s = (statistics.median(each) for each in zip(*map(astuple, paces), strict=True))
        return cls(ttft_s, gap_s)

    def longest(self) -> Pace:
        """What a server that has nothing else to do takes at the most, by what it takes usually."""
        return Pace(_FACTOR * self.ttft_s + _SLACK_S, _FACTOR * self.gap_s + _SLACK_S)

    def is_within(self, limit: Pace) -> bool:
        return self.ttft_s <= limit.ttft_s and self.gap_s <= limit.gap_s

    def __str__(self) -> str:
        return f"{self.ttft_s * 1e3:.0f} ms to its first token or {self.gap_s * 1e3:.0f} ms between two"


@dataclass
class Idleness:
    """Asks for some tokens after short prompts, which no request shares, with as many requests at once as there are
    workers: a prefill worker gives a first token whatever decode does, and of two alike the one that has less to do is
    asked first. Metrics would not do: one server's have other names than another's, and vLLM's show what it did last
    until it has something to do again."""

    client: LoadClient
    model: str
    vocabulary: Sequence[int]
    num_workers: int
    alone: Pace = Pace(0.0, 0.0)  # when nothing else was asked
    num_asked: int = field(default=0, init=False)

    @classmethod
    @contextlib.asynccontextmanager
    async def measured(cls, url: str, vocabulary: Sequence[int], num_workers: int) -> AsyncIterator[Idleness]:
        """Of the server at `url`, which has nothing to do now. Raises `TandemError` where it does not answer."""
        client = LoadClient(url, max_sockets=num_workers, timeout_s=_ANSWER_S)
        try:
            found = cls(client, (await connected(client, url, None)).name, vocabulary, num_workers)
            found.alone = Pace.usual([await found.ask() for _ in range(_NUM_ALONE)])
            yield found
        finally:
            client.close()

    async def wait(self) -> None:
        """Until the server has nothing to do. Raises `TandemError` where it goes on for a minute."""
        limit = self.alone.longest()
        try:
            async with asyncio.timeout(_SETTLE_S):
                while not (await self.ask()).is_within(limit):
                    pass
        except TimeoutError:
            raise TandemError(
                f"a request alone still takes more than {limit}, {_SETTLE_S:.0f} s after the load has ended; it took "
                f"{self.alone} before"
            ) from None

    async def ask(self) -> Pace:
        """One request for each worker, all at once. Raises `TandemError` where one fails."""
        self.num_asked += 1
        entries = fixed_lengths(self.num_workers, _NUM_INPUT, _NUM_OUTPUT)
        jobs = make_jobs(entries, vocabulary=self.vocabulary, seed=f"idle:{self.num_asked}")
        answers = await asyncio.gather(*(answered(self.client, job, self.model) for job in jobs))
        return Pace.of([record for record, _ in answers])


async def answered(client: LoadClient, job: Job, model: str) -> tuple[RequestRecord, StreamLog]:
    """One request and its answer. Raises `TandemError` where it fails."""
    outcome = await client.request(client.message("POST", PATH, body_of(job, model, ignore_eos=True)))
    record = record_of(job, outcome, began_s=outcome.sent_s)
    if outcome.stream is None or not record.is_good:
        raise TandemError(f"a request alone was not answered ({record.failure}): {record.message}")
    return record, outcome.stream
