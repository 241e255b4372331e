"""Whether a server is done with a load that was broken off: a short request is then as fast as before the load."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable

from tandem.bench.load.drive import PATH, record_of
from tandem.bench.load.http_client import LoadClient
from tandem.bench.load.workload import body_of, fixed_lengths, make_jobs
from tandem.bench.session import Session

#: Of a short request. Its later tokens are for servers whose workers for prompts give the first one.
_NUM_INPUT, _NUM_OUTPUT = 16, 4
_NUM_ALONE = 3  # requests whose median tells how fast they are alone
#: What a server that has nothing else to do takes at the most, by what it took before.
_FACTOR, _SLACK_S = 1.5, 0.05
_AGAIN_S = 0.05


class Settling:
    """Asks for some tokens after short prompts, which no request shares. SIGINT ends the waiting as it ends a run."""

    def __init__(self, session: Session, say: Callable[[str], None], *, limit_s: float = 60.0) -> None:
        """`say` hears of a server that is not done after `limit_s`."""
        self._session, self._say, self._limit_s = session, say, limit_s
        self._num_asked = 0
        self._alone_s: float | None = None  # `None`: no request was answered

    async def measure(self) -> None:
        """How long a request takes now, while the server has nothing else to do."""
        client = self._session.client()
        try:
            with self._session.interruptible(client.close):
                took_s = [await self._ask(client) for _ in range(_NUM_ALONE)]
        finally:
            client.close()
        answered_s = [each_s for each_s in took_s if each_s is not None]
        self._alone_s = statistics.median(answered_s) if answered_s else None

    async def wait(self) -> None:
        """Until a request takes about as long as it did when it was measured, or the time is up."""
        if self._alone_s is None:
            return
        longest_s = _FACTOR * self._alone_s + _SLACK_S
        client = self._session.client()
        try:
            with self._session.interruptible(client.close):
                async with asyncio.timeout(self._limit_s):
                    while not self._session.was_interrupted:
                        took_s = await self._ask(client)
                        if took_s is not None and took_s <= longest_s:
                            return
                        await asyncio.sleep(_AGAIN_S)
        except TimeoutError:
            self._say(
                f"the server is still busy {self._limit_s:g} s after a probe was broken off: a short request takes "
                f"more than {longest_s * 1e3:.0f} ms, and took {self._alone_s * 1e3:.0f} ms before; the next probe "
                "begins all the same"
            )
        finally:
            client.close()

    async def _ask(self, client: LoadClient) -> float | None:
        """How long one request takes; `None`: it failed."""
        self._num_asked += 1
        workload, target = self._session.workload, self._session.target
        entries, seed = fixed_lengths(1, _NUM_INPUT, _NUM_OUTPUT), f"{workload.seed}:settling:{self._num_asked}"
        (job,) = make_jobs(entries, vocabulary=workload.vocabulary, seed=seed)
        body = body_of(job, self._session.served.name, ignore_eos=target.ignore_eos)
        outcome = await client.request(client.message("POST", PATH, body))
        record = record_of(job, outcome, began_s=outcome.sent_s)
        return record.e2e_s if record.is_good else None
