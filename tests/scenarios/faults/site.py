"""Where faults happen: a cluster under an overseer, and beside it an undisturbed one that says what is right."""

from __future__ import annotations

import contextlib
import functools
import random
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tandem.core.model_path import resolve_model
from tandem.core.tokenizer import Tokenizer
from tests.scenarios.client import Answer, ask, complete
from tests.scenarios.faults.arming import PointNotReachedError, Points
from tests.scenarios.faults.cases import FORMS, Case
from tests.scenarios.faults.stall import StallMonitor
from tests.scenarios.footprint import Footprint, connections, shared_memory
from tests.scenarios.overseer import Overseer
from tests.scenarios.processes import Process, ProcessCluster, running, shows_idle
from tests.support.waiting import nothing, wait_until

LEASE_S = 1.0
GRACE_S = 0.5
NOTICE_S = 1.0
"""Within which a killed process is noticed."""
ALLOWED = 3
"""Assertions allow so many times a bound: other work shares the cores."""
MAX_TOKENS = 32

SERVED = {"model": {"served_names": ["*"]}}
CONFIG: dict[str, Any] = {
    **SERVED,
    "transport": {"lease_s": LEASE_S, "grace_s": GRACE_S},
    # Four chunks a prompt; what decode lacks of it is computed there only when it is little.
    "scheduling": {"chunk_size": 128, "local_prefill_tokens": 192, "mixed_prompt_tokens": 192},
    # Where outputs repeat themselves; the undisturbed cluster does not guess.
    "speculation": {"lookup_tokens": 5},
    # Every request of the matrix meets a fault.
    "limits": {"retry_budget": 1.0},
}

_PORTS = ("address", "http", "control")

#: Beyond what warm-up brings about: a channel from decode to each prefill worker, made when it first asks one to stop.
_LAZY = {"decode": {"socket": 2}, "prefill": {"socket": 2}}

_WORDS = """the a little big red old happy dog cat bird girl boy tree house garden river ball boat saw took made found
said went played ran and then but because with under near in to she he they it was very good one day sun rain"""


@dataclass
class Outcome:
    """What a request became whose cluster was struck."""

    answer: Answer
    struck: str  # the process
    struck_at: float  # wall clock

    @property
    def recovery_s(self) -> float | None:
        """How long the client waited for a token, or the end, after the fault; `None`: it had all of it before.

        Tokens that were on their way come right after the fault, so it is the longest of the waits that counts.
        """
        times = [*self.answer.token_times, self.answer.ended]
        waits = pairwise([self.struck_at, *(at for at in times if at > self.struck_at)])
        return max((later - earlier for earlier, later in waits), default=None)

    @property
    def saw(self) -> str:
        """What its client did, for the report."""
        if self.answer.broken:
            return "broken connection"
        return f"error {self.answer.error.get('code')}" if self.answer.error else "same tokens"


@dataclass
class Site:
    """One cluster for many cases; see `site` for how it comes about."""

    cluster: ProcessCluster
    overseer: Overseer
    points: Points
    stalls: StallMonitor
    reference_url: str
    lease_s: float = LEASE_S
    baselines: dict[str, Footprint] = field(default_factory=dict)  # by kind of process
    _shm: set[str] = field(default_factory=set)

    # -- requests

    def expected(self, prompt: list[int], fields: dict[str, Any]) -> Answer:
        """What an undisturbed cluster answers."""
        return complete(self.reference_url, prompt, **{"max_tokens": MAX_TOKENS, **fields})

    def strike(self, case: Case, prompt: list[int]) -> Outcome:
        """Run the case's request and its fault. Raises `PointNotReachedError` when there was no fault."""
        self.points.clear()
        self.points.arm_any(case.point, case.signal, case.nth)
        with ThreadPoolExecutor(1) as pool:
            fields = {"max_tokens": MAX_TOKENS, **case.fields}
            asked = pool.submit(ask, self.cluster.url, prompt, streamed=case.streamed, **fields)
            name, struck_at = self._wait_struck(case, asked)
            victim = self.process(name)
            if case.signal == "stop":
                self.wake_after_lease(victim, struck_at)
            else:
                victim.popen.wait()
            answer = asked.result()
        return Outcome(answer, name, struck_at)

    def wake_after_lease(self, victim: Process, stopped_at: float) -> None:
        """SIGCONT once the lease is over; who was killed meanwhile stays dead."""
        time.sleep(max(0.0, stopped_at + self.lease_s + 0.2 - time.time()))
        victim.kill(signal.SIGCONT)

    def process(self, name: str) -> Process:
        return self.cluster.router if name == "router" else self.cluster.workers[name]

    def _wait_struck(self, case: Case, asked: Future[Answer]) -> tuple[str, float]:
        """Which process was struck, and when."""

        def struck() -> bool:
            return asked.done() or self.points.hit_by(case.point) is not None

        wait_until(struck, f"a process at {case.point}, or the answer", 120, every_s=0.002)
        if (name := self.points.hit_by(case.point)) is None:
            raise PointNotReachedError(f"no process came to {case.point}: {asked.result()}")
        at = self.points.hit_at(name, case.point)
        assert at is not None
        return name, at

    def check_in_time(self, case: Case, outcome: Outcome) -> None:
        """The next token, or the end, came soon enough after the fault."""
        bound_s = NOTICE_S if case.signal == "kill" else self.lease_s
        if outcome.recovery_s is not None:
            assert outcome.recovery_s <= ALLOWED * bound_s, (
                f"{outcome.recovery_s:.2f} s from the fault to the next token, bound {bound_s:g} s; "
                + self.stall_note(outcome.struck_at)
            )

    def check_freed(self, case: Case) -> float:
        """`check_baseline` as soon as the case allows. A dead process is a fence at once; what a stopped one may write
        waits for its word, after lease and grace."""
        return self.check_baseline(ALLOWED * (NOTICE_S if case.signal == "kill" else self.lease_s + GRACE_S))

    # -- before and after

    def ready(self) -> Site:
        """Itself, whole and idle, with nothing armed."""
        self.points.clear()
        self.prepare()
        return self

    def prepare(self) -> None:
        """Until the cluster is whole and idle, and the router knows."""
        self.overseer.wait_whole()
        self.cluster.wait_idle()
        self.cluster.wait_for(lambda: shows_idle(self.cluster.url), "a router that knows of it")

    def warm_up(self) -> None:
        """Use every pair of workers, lose one of each pool, use them again; then note what each kind holds."""
        self.use_all_pairs("before")
        for process in [self.process(name) for name in self.cluster.workers if name.endswith("-0")]:
            process.end()
        self.overseer.wait_whole()
        self.use_all_pairs("after")
        self.prepare()
        self._shm = shared_memory()
        for process in self.cluster.processes:
            kind = kind_of(process)
            now = Footprint.of(process.pid).plus(_LAZY.get(kind, {}))
            self.baselines[kind] = now.joined(self.baselines.get(kind, now))

    def use_all_pairs(self, when: str) -> None:
        """Requests at the same time, so that each prefill worker sends to each decode worker; some by a grammar, which
        has threads of its own."""
        with ThreadPoolExecutor(12) as pool:
            for n in range(24):
                form = FORMS["json"] if n % 3 == 0 else {}
                pool.submit(complete, self.cluster.url, story(f"warm {when} {n}", 300), max_tokens=20, **form)

    def check_baseline(self, timeout_s: float) -> float:
        """Within `timeout_s` nothing is held for any request, and no process holds more than it did before.

        Returns:
            The seconds that it took.
        """
        began = time.monotonic()
        since = time.time()
        self.cluster.wait_idle(timeout_s)
        wait_until(
            self._excess,
            "nothing beyond the baseline",
            began + timeout_s - time.monotonic(),
            wanted=nothing,
            every_s=0.05,
            more=lambda: f"{self._connections()}; {self.stall_note(since)}",
        )
        return time.monotonic() - began

    def _excess(self) -> dict[str, dict[str, int]]:
        excess = {}
        if self.cluster.router.lives and self.cluster.router.facts:
            status = self.cluster.router_status()
            if status.num_under_way or status.num_waiting:
                excess["router's requests"] = {"under way": status.num_under_way, "waiting": status.num_waiting}
        for process in self.cluster.processes:
            if process.lives and (more := Footprint.of(process.pid).beyond(self.baselines[kind_of(process)])):
                excess[process.name] = more
        if more_shm := shared_memory() - self._shm:
            excess["/dev/shm"] = dict.fromkeys(sorted(more_shm), 1)
        return excess

    def _connections(self) -> dict[str, list[str]]:
        """Who is connected to whom, for people."""
        names = {
            p.facts[key].rpartition(":")[2]: p.name
            for p in self.cluster.processes
            if p.facts
            for key in _PORTS
            if key in p.facts
        }
        return {p.name: connections(p.pid, names) for p in self.cluster.processes if p.lives}

    def stall_note(self, since: float) -> str:
        return f"this host's own worst stall since was {self.stalls.worst_since(since):.2f} s"


def story(name: str, num_tokens: int = 490) -> list[int]:
    """Token ids of a text that no other name has, so that nothing of it is cached; the last page is not full."""
    words = random.Random(name).choices(_WORDS.split(), k=num_tokens)
    return _tokenizer().encode(f"Story {name}. " + " ".join(words))[:num_tokens]


@functools.cache
def _tokenizer() -> Tokenizer:
    return Tokenizer.from_dir(resolve_model("embedded"))


def kind_of(process: Process) -> str:
    """`prefill`, `decode` or `router`: processes that should hold alike."""
    return process.name.partition("-")[0]


def assert_same(answer: Answer, expected: Answer) -> None:
    """Token for token, character for character, and no token twice or missing."""
    assert answer.error is None, answer.error
    assert answer.broken == ""
    assert answer.done
    assert answer.token_ids == expected.token_ids
    assert answer.texts == expected.texts
    assert answer.finish_reasons == expected.finish_reasons
    for ours, theirs in zip(answer.logprobs, expected.logprobs, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-4)


def assert_typed_error(answer: Answer) -> None:
    """A kind, a message, the request's id, and whether to try again."""
    assert answer.error is not None, answer
    for name in ("code", "type", "message", "request_id"):
        assert answer.error.get(name), f"{name} is missing: {answer.error}"
    assert isinstance(answer.error.get("retryable"), bool), answer.error


def assert_begins_alike(answer: Answer, expected: Answer) -> None:
    """What was given before an error is the beginning of what was right."""
    for given, right in zip(answer.token_ids, expected.token_ids, strict=True):
        assert given == right[: len(given)]
    for shown, text in zip(answer.texts, expected.texts, strict=True):
        assert text.startswith(shown)


@contextlib.contextmanager
def undisturbed_cluster(directory: Path, model: str = "embedded") -> Iterator[str]:
    """The address of a cluster that says what is right, for the length of a `with` block."""
    directory.mkdir()
    config = {**SERVED, "scheduling": {"chunk_size": CONFIG["scheduling"]["chunk_size"]}}
    with running(directory, model=model, config=config) as cluster:
        yield cluster.url


@contextlib.contextmanager
def site(
    directory: Path,
    num_prefill: int = 2,
    num_decode: int = 2,
    *,
    config: dict[str, Any] | None = None,
    model: str = "embedded",
    decode_module: str = "decode_worker",
    warm: bool = True,
    undisturbed: str = "",
) -> Iterator[Site]:
    """A site for the length of a `with` block.

    Args:
        decode_module: as of `ProcessCluster`.
        undisturbed: where a cluster of `undisturbed_cluster` answers; empty: the site has one of its own.
    """
    config = config or CONFIG
    points = Points(directory / "points")
    cluster = ProcessCluster(directory, model, config, points.directory, decode_module=decode_module)
    with contextlib.ExitStack() as undo:
        cluster.launch(num_prefill, num_decode)
        undo.callback(cluster.stop)
        undisturbed = undisturbed or undo.enter_context(undisturbed_cluster(directory / "undisturbed", model))
        cluster.wait_started()
        lease_s = config.get("transport", {}).get("lease_s", 10.0)
        overseer = undo.enter_context(Overseer(cluster, silence_s=4 * lease_s))
        found = Site(cluster, overseer, points, undo.enter_context(StallMonitor()), undisturbed, lease_s)
        if warm:
            found.warm_up()
        yield found
