"""Whether a server has nothing to do: it then answers a request alone as fast as it did when it was started."""

from __future__ import annotations

import asyncio
import contextlib
import statistics
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from tandem.bench.load.drive import PATH, record_of
from tandem.bench.load.http_client import LoadClient
from tandem.bench.load.records import RequestRecord
from tandem.bench.load.stream_log import StreamLog
from tandem.bench.load.workload import Job, body_of, fixed_lengths, make_jobs
from tandem.bench.server import connected
from tandem.core.errors import TandemError

_NUM_INPUT = 16
_NUM_ALONE = 7  # requests whose median tells how fast one alone is
_ANSWER_S = 60.0
_SETTLE_S = 60.0
#: A step of a batch that is still under way makes a request wait longer than this.
_FACTOR, _SLACK_S = 2.0, 0.005


@dataclass
class Idleness:
    """Asks for one token after a short prompt, with a prompt of its own each time. Metrics would not do: one server's
    have other names than another's, and vLLM's show what it did last until it has something to do again."""

    client: LoadClient
    model: str
    vocabulary: Sequence[int]
    alone_s: float = 0.0  # the median TTFT when nothing else was asked
    num_asked: int = field(default=0, init=False)

    @classmethod
    @contextlib.asynccontextmanager
    async def measured(cls, url: str, vocabulary: Sequence[int]) -> AsyncIterator[Idleness]:
        """Of the server at `url`, which has nothing to do now. Raises `TandemError` where it does not answer."""
        client = LoadClient(url, max_sockets=1, timeout_s=_ANSWER_S)
        try:
            found = cls(client, (await connected(client, url, None)).name, vocabulary)
            found.alone_s = statistics.median([await found.ask_s() for _ in range(_NUM_ALONE)])
            yield found
        finally:
            client.close()

    async def wait(self) -> None:
        """Until the server has nothing to do. Raises `TandemError` where it goes on for a minute."""
        limit_s = _FACTOR * self.alone_s + _SLACK_S
        try:
            async with asyncio.timeout(_SETTLE_S):
                while await self.ask_s() > limit_s:
                    pass
        except TimeoutError:
            raise TandemError(
                f"a request alone still takes more than {limit_s * 1e3:.0f} ms, {_SETTLE_S:.0f} s after the load has "
                f"ended; it took {self.alone_s * 1e3:.0f} ms before"
            ) from None

    async def ask_s(self) -> float:
        """The TTFT of a request. Raises `TandemError` where it fails."""
        self.num_asked += 1
        seed = f"idle:{self.num_asked}"
        (job,) = make_jobs(fixed_lengths(1, _NUM_INPUT, 1), vocabulary=self.vocabulary, seed=seed)
        record, _ = await answered(self.client, job, self.model)
        return record.ttft_s


async def answered(client: LoadClient, job: Job, model: str) -> tuple[RequestRecord, StreamLog]:
    """One request and its answer. Raises `TandemError` where it fails."""
    outcome = await client.request(client.message("POST", PATH, body_of(job, model, ignore_eos=True)))
    record = record_of(job, outcome, began_s=outcome.sent_s)
    if outcome.stream is None or not record.is_good:
        raise TandemError(f"a request alone was not answered ({record.failure}): {record.message}")
    return record, outcome.stream
