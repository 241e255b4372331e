"""The clients of the soak: mixed requests without an end, each answer compared with the one of a quiet cluster."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.scenarios.client import Answer, RawStream, ask, complete, events
from tests.scenarios.faults.site import assert_begins_alike, assert_same, story

HUNG_S = 60.0
"""A request that has not ended after so long hangs: retries, waits for a worker and restarts fit in well."""

_RETRY_CONNECT_S = 0.2

_SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.9, "top_p": 0.95, "seed": 3, "presence_penalty": 0.4},
    {"temperature": 1.0, "seed": 9, "n": 2},
    {"temperature": 0, "stop": ["\n\n", " zz"]},
]

_KINDS = {"streamed": 8, "whole": 6, "leaves": 2, "slow": 1, "deadline": 1}
"""How a client behaves, and how often."""


_FAULTS_OF_OURS = ("internal",)
"""Codes of errors that no fault of a process excuses."""


@dataclass(frozen=True)
class Job:
    """A request, and what a quiet cluster answers."""

    prompt: list[int]
    fields: dict[str, Any]
    expected: Answer


def make_jobs(url: str, num_jobs: int) -> list[Job]:
    """Short and long prompts, short and long answers, every sampling; asks the cluster for each answer."""
    jobs = []
    for n in range(num_jobs):
        prompt = story(f"soak {n}", (24, 120, 490, 900)[n % 4])
        fields = {**_SAMPLINGS[n // 4 % len(_SAMPLINGS)], "max_tokens": (8, 60, 200)[n % 3], "ignore_eos": True}
        jobs.append(Job(prompt, fields, complete(url, prompt, **fields)))
    return jobs


@dataclass
class Tally:
    """What became of all requests. Every one is in `outcomes` once."""

    outcomes: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    hung: list[str] = field(default_factory=list)
    slowest_s: float = 0.0
    num_tokens: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def error_share(self) -> float:
        """Typed errors that no client asked for (by a deadline), of all requests that were read to their end."""
        num_errors = sum(n for name, n in self.outcomes.items() if name.startswith("error ") and "deadline" not in name)
        return num_errors / max(1, num_errors + self.outcomes["same"])

    def add(self, outcome: str, *, took_s: float, num_tokens: int = 0, detail: str = "") -> None:
        """Count one end; `wrong` and `hung` keep their detail."""
        with self._lock:
            self.outcomes[outcome] += 1
            self.slowest_s = max(self.slowest_s, took_s)
            self.num_tokens += num_tokens
            if outcome == "wrong":
                self.wrong.append(detail)
            elif outcome == "hung":
                self.hung.append(detail)


class Clients:
    """Threads that each send one request after another until the block ends.

    Args:
        router_struck_since: whether the router was struck after a time of the wall clock: only that breaks connections.
    """

    def __init__(
        self, url: str, jobs: list[Job], num_clients: int, seed: int, router_struck_since: Callable[[float], bool]
    ) -> None:
        self.tally = Tally()
        self._url = url
        self._jobs = jobs
        self._router_struck_since = router_struck_since
        self._stop = threading.Event()
        self._failures: list[BaseException] = []
        self._threads = [
            threading.Thread(target=self._run, args=(random.Random(f"{seed}/{n}"),), name=f"client-{n}")
            for n in range(num_clients)
        ]

    def __enter__(self) -> Clients:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(2 * HUNG_S)
            assert not thread.is_alive(), f"{thread.name} hangs"
        if self._failures:
            raise self._failures[0]

    def _run(self, rng: random.Random) -> None:
        try:
            while not self._stop.is_set():
                job = rng.choice(self._jobs)
                (kind,) = rng.choices(tuple(_KINDS), tuple(_KINDS.values()))
                self._one(rng, job, kind)
        except BaseException as error:  # noqa: BLE001 - raised again where the test waits
            self._failures.append(error)

    def _one(self, rng: random.Random, job: Job, kind: str) -> None:
        began = time.time()
        try:
            if kind == "leaves":
                outcome, num_tokens, detail = self._leave(job, rng.randrange(6)), 0, ""
            elif kind == "slow":
                outcome, num_tokens, detail = self._read_slowly(job), 0, ""
            else:
                extra = {"timeout": 0.5} if kind == "deadline" else {}
                fields = {**job.fields, **extra}
                answer = ask(self._url, job.prompt, streamed=kind != "whole", timeout_s=HUNG_S, **fields)
                outcome, detail = self._judge(job, answer, began)
                num_tokens = sum(map(len, answer.token_ids))
        except httpx.TimeoutException as error:
            outcome, num_tokens, detail = "hung", 0, repr(error)
        took_s = time.time() - began
        if took_s > HUNG_S:
            outcome = "hung"
        self.tally.add(outcome, took_s=took_s, num_tokens=num_tokens, detail=f"{kind}, {took_s:.1f} s: {detail}")
        if outcome == "no connection":
            self._stop.wait(_RETRY_CONNECT_S)

    def _judge(self, job: Job, answer: Answer, began: float) -> tuple[str, str]:
        """What an answer is, and what is wrong with it."""
        try:
            if answer.broken:
                assert_begins_alike(answer, job.expected)
                if not self._router_struck_since(began):
                    return "wrong", f"broken, and no router was struck: {answer.broken}"
                return ("broken by the router's end" if any(answer.token_ids) else "no connection"), ""
            if answer.error is not None:
                assert_begins_alike(answer, job.expected)
                assert answer.error["code"] not in _FAULTS_OF_OURS
                assert answer.error.get("request_id")
                assert isinstance(answer.error.get("retryable"), bool)
                return f"error {answer.error['code']}", ""
            assert_same(answer, job.expected)
        except AssertionError as error:
            return "wrong", f"{error}; {answer}"
        return "same", ""

    def _leave(self, job: Job, num_events: int) -> str:
        """Close the connection in the middle of the stream."""
        stream = events(self._url, job.prompt, **job.fields)
        try:
            for _ in range(num_events):
                if next(stream, None) is None:
                    break
        except httpx.TimeoutException:
            raise
        except httpx.TransportError:
            return "no connection"
        except AssertionError:  # an error status, which other clients judge
            return "left, after an error"
        finally:
            stream.close()
        return "left"

    def _read_slowly(self, job: Job) -> str:
        """Leave the answer unread for a while, then read all of it, or find it cut off."""
        try:
            client = RawStream(self._url, job.prompt, receive_bytes=4096, **job.fields)
        except ConnectionError:
            return "no connection"
        try:
            self._stop.wait(1.0)
            client.wait_closed()
        except TimeoutError:
            return "hung"
        finally:
            client.close()
        return "read slowly"
