"""The way of one request through the router: stamps, and the waterfall that they make. Pure."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from tandem.core.identity import WorkerKey
from tandem.core.states import RequestState
from tandem.core.step_times import PromptSteps

_MAX_TICKS = 2048
_MAX_WORK = 256
#: Parts of a request's time, by the state in which it is.
PART_NAMES = {
    RequestState.QUEUED: "waits for prefill",
    RequestState.PREFILLING: "prefill",
    RequestState.HANDOFF: "handoff",
    RequestState.DECODING: "decode",
}


@dataclass(frozen=True, slots=True)
class Span:
    """A part of a request's time. Begin and end are seconds since it arrived."""

    name: str
    begin_s: float
    end_s: float
    attempt: int = 0  # 0: before the first, and after the last


@dataclass(frozen=True, slots=True)
class Work:
    """A part of what a worker did for the request; begin and end are seconds since it arrived.

    These lie within the spans of the same time, and may overlap: pages travel while the next chunk is computed.
    """

    worker: str
    name: str
    begin_s: float
    end_s: float
    count: int  # tokens that were computed, or bytes that were sent


class Candidate(Protocol):
    """A worker that a decision weighed; figures in prompt tokens."""

    @property
    def worker(self) -> WorkerKey: ...
    @property
    def num_held_tokens(self) -> int: ...
    @property
    def num_tokens_in_front(self) -> int: ...
    @property
    def num_active(self) -> int: ...
    @property
    def cost(self) -> float: ...
    @property
    def cost_alone(self) -> float | None: ...
    @property
    def num_stored_tokens(self) -> int: ...
    @property
    def why_not_alone(self) -> str: ...
    @property
    def prompt_steps(self) -> PromptSteps: ...


@dataclass(slots=True)
class AttemptNote:
    """One attempt, its workers, and how it ended."""

    number: int
    began_s: float
    prefill: str | None
    decode: str | None
    why: str
    ended: str = ""
    #: What the decision weighed, of workers that hold some of the prompt and of the least loaded.
    weighed: Sequence[Candidate] = ()


@dataclass(slots=True)
class Trace:
    """What is known of one request. Times are on the router's clock.

    Attributes:
        stamps: when it reached which state; the request's own list, which grows.
        arrived_s: when its first bytes had come to this host.
        begun_s: when the router came to it: a busy one leaves what comes where it is.
        read_s, ready_s: when its body had come, and when it had been tokenised and let in.
        ended_s: when the end of its answer was written; `None` while it goes on.
        parent: its client's `traceparent` and `tracestate`, so far as it sent them.
    """

    request_id: str
    client_id: str
    arrived_s: float
    num_prompt_tokens: int
    num_choices: int
    kind: str = ""
    parent: Mapping[str, str] = field(default_factory=dict)
    begun_s: float | None = None
    read_s: float | None = None
    ready_s: float | None = None
    ended_s: float | None = None
    outcome: str = ""
    error: str = ""
    computed_by: str = ""
    num_cached_tokens: int | None = None
    num_output_tokens: int = 0
    stamps: Sequence[tuple[float, RequestState]] = ()
    attempts: list[AttemptNote] = field(default_factory=list)
    #: The first `_MAX_WORK`.
    work: list[Work] = field(default_factory=list)
    #: Seconds from the arrival to each token that was given out, of all choices: the first `_MAX_TICKS`.
    ticks: array[float] = field(default_factory=lambda: array("f"))

    def token(self, now_s: float, count: int) -> None:
        self.num_output_tokens += count
        if len(self.ticks) < _MAX_TICKS:
            self.ticks.append(now_s - self.arrived_s)

    def worked(self, worker: str, name: str, begin_s: float, end_s: float, count: int) -> None:
        if len(self.work) < _MAX_WORK:
            begin_s, end_s = (max(0.0, stamp_s - self.arrived_s) for stamp_s in (begin_s, end_s))
            self.work.append(Work(worker, name, begin_s, end_s, count))

    @property
    def state(self) -> str:
        return self.outcome or (self.stamps[-1][1].value if self.stamps else RequestState.QUEUED.value)

    def attempt_began(
        self,
        now_s: float,
        number: int,
        prefill: WorkerKey | None,
        decode: WorkerKey | None,
        why: str,
        weighed: Sequence[Candidate] = (),
    ) -> None:
        names = _name(prefill) if prefill else None, _name(decode) if decode else None
        self.attempts.append(AttemptNote(number, now_s, *names, why, weighed=weighed))

    def spans(self, now_s: float) -> list[Span]:
        """The request's time, part by part: each begins where the one before ends, from its arrival to its end or
        now."""
        end_s = self.ended_s if self.ended_s is not None else now_s
        borders = [*self._borders(), (max(end_s, self.arrived_s), "", 0)]
        found, begin_s = [], self.arrived_s
        for (from_s, name, attempt), (to_s, _, _) in itertools.pairwise(borders):
            from_s, to_s = max(from_s, begin_s), max(to_s, begin_s)
            if to_s > from_s:
                found.append(Span(name, from_s - self.arrived_s, to_s - self.arrived_s, attempt))
            begin_s = to_s
        return found

    def _borders(self) -> Iterator[tuple[float, str, int]]:
        """Where each part begins, in order of time; what begins later hides the end of what came before."""
        points: list[tuple[float, int, str, int]] = [(self.arrived_s, 0, "waits for router", 0)]
        if self.begun_s is not None:
            points.append((self.begun_s, 0, "read", 0))
        if self.read_s is not None:
            points.append((self.read_s, 1, "tokenise", 0))
        if self.ready_s is not None:
            points.append((self.ready_s, 2, "queue", 0))
        points += [(note.began_s, 4, PART_NAMES[RequestState.QUEUED], note.number) for note in self.attempts]
        is_first = True
        for stamp_s, state in self.stamps:
            if state is RequestState.QUEUED:  # again: an attempt failed
                if not is_first:
                    points.append((stamp_s, 3, "queue", self._attempt_at(stamp_s)))
                is_first = False
            elif state in PART_NAMES:
                points.append((stamp_s, 5, PART_NAMES[state], self._attempt_at(stamp_s)))
            else:
                points.append((stamp_s, 6, "send", 0))
        for from_s, _, name, attempt in sorted(points, key=lambda point: point[:2]):  # those at once as they came
            yield from_s, name, attempt

    def _attempt_at(self, now_s: float) -> int:
        return next((note.number for note in reversed(self.attempts) if note.began_s <= now_s), 0)

    def summary(self, now_s: float) -> dict[str, Any]:
        """A line of the page's table."""
        last = self.attempts[-1] if self.attempts else None
        end_s = self.ended_s if self.ended_s is not None else now_s
        return {
            "id": self.request_id,
            "kind": self.kind,
            "state": self.state,
            "error": self.error,
            "age_s": round(end_s - self.arrived_s, 6),
            "ttft_s": round(self.ticks[0], 6) if self.ticks else None,
            "prompt_tokens": self.num_prompt_tokens,
            "cached_tokens": self.num_cached_tokens,
            "output_tokens": self.num_output_tokens,
            "choices": self.num_choices,
            "attempt": last.number if last else 0,
            "prefill": last.prefill if last else None,
            "decode": last.decode if last else None,
            "computed_by": self.computed_by,
        }

    def describe(self, now_s: float) -> dict[str, Any]:
        """All of it, as `GET /v1/requests/{id}` says it."""
        return {
            **self.summary(now_s),
            "spans": [
                {"name": s.name, "begin_s": round(s.begin_s, 6), "end_s": round(s.end_s, 6), "attempt": s.attempt}
                for s in self.spans(now_s)
            ],
            "attempts": [
                {
                    "number": note.number,
                    "prefill": note.prefill,
                    "decode": note.decode,
                    "why": note.why,
                    "began_s": round(note.began_s - self.arrived_s, 6),
                    "ended": note.ended,
                    "candidates": [_explained(candidate) for candidate in note.weighed],
                }
                for note in self.attempts
            ],
            "work": [
                {**asdict(work), "begin_s": round(work.begin_s, 6), "end_s": round(work.end_s, 6)} for work in self.work
            ],
            "token_s": [round(tick, 6) for tick in self.ticks],
        }


def _explained(candidate: Candidate) -> dict[str, Any]:
    explained: dict[str, Any] = {
        "worker": _name(candidate.worker),
        "held_tokens": candidate.num_held_tokens,
        "stored_tokens": candidate.num_stored_tokens,
        "tokens_in_front": candidate.num_tokens_in_front,
        "active_requests": candidate.num_active,
        "cost_tokens": round(candidate.cost, 1),
    }
    if candidate.cost_alone is not None:
        explained["cost_alone_tokens"] = round(candidate.cost_alone, 1)
    if candidate.why_not_alone:
        explained["why_not_alone"] = candidate.why_not_alone
    if (steps := candidate.prompt_steps).num_tokens:
        explained["prompt_steps"] = {
            "tokens": steps.num_tokens,
            "step_ms": round(steps.step_s * 1e3, 3),
            "token_ms": round(steps.token_s * 1e3, 4),
        }
    return explained


def _name(key: WorkerKey) -> str:
    return key.worker_id
