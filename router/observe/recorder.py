"""Remembers the requests of one router: those under way, the last that ended, and figures of the last minutes. Pure.

What a token costs here does not grow with the number of requests, and what is remembered is bounded.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Protocol

from router.observe.history import History
from router.observe.trace import Trace
from tandem.core.identity import Role


class WorkSpan(Protocol):
    """A part of a worker's work; times in seconds before it told of it."""

    @property
    def name(self) -> str: ...
    @property
    def begin_s(self) -> float: ...
    @property
    def end_s(self) -> float: ...
    @property
    def count(self) -> int: ...


NUM_ENDED = 1000
"""Requests that are remembered after their end."""
MAX_FOUND = 32
"""A gateway may give all of its requests one id."""

_log = logging.getLogger(__name__)


class Recorder:
    """Args: times of all methods are on the router's clock."""

    def __init__(self, epoch_s: float = 0.0) -> None:
        """`epoch_s`: since the epoch, when that clock was at zero."""
        self.history = History(epoch_s)
        #: Called with each trace that has ended.
        self.on_end: Callable[[Trace], object] = lambda _: None
        # Invariant: a request is in exactly one of these; `_ended` in the order in which they ended.
        self._running: dict[str, Trace] = {}
        self._ended: dict[str, Trace] = {}
        # The traces that a client's id names, of those in the two above.
        self._by_client: dict[str, list[Trace]] = {}
        self._num_ended = 0

    # -- what happens

    def begin(self, trace: Trace) -> None:
        """A request was let in."""
        self._running[trace.request_id] = trace
        self._by_client.setdefault(trace.client_id, []).append(trace)
        self.history.at(trace.arrived_s).num_arrived += 1

    def first_token(self, now_s: float, ttft_s: float) -> None:
        """A request has got its first."""
        self.history.at(now_s).ttft.add(ttft_s)

    def tokens(self, now_s: float, count: int, gaps_s: Iterable[float]) -> None:
        """So many were given out, each of these seconds after the one before of its choice."""
        second = self.history.at(now_s)
        second.num_tokens += count
        second.itl.add(*gaps_s)

    def worked(self, request_id: str, attempt: int, role: Role, spans: Iterable[WorkSpan], now_s: float) -> None:
        """A worker has told, right after, what it did for an attempt: the way from there counts as its own."""
        trace = self._running.get(request_id) or self._ended.get(request_id)
        note = next((note for note in trace.attempts if note.number == attempt), None) if trace else None
        worker = note and (note.prefill if role is Role.PREFILL else note.decode)
        if trace is None or not worker:
            return
        for span in spans:
            trace.worked(worker, span.name, now_s - span.begin_s, now_s - span.end_s, span.count)

    def end(self, request_ids: Iterable[str], now_s: float) -> None:
        """The answer to these has been written, or will never be."""
        for request_id in request_ids:
            trace = self._running.pop(request_id, None)
            if trace is None:
                continue
            trace.ended_s = now_s
            self.history.at(now_s).outcomes[trace.outcome or "failed"] += 1
            self._ended[request_id] = trace
            self._num_ended += 1
            if len(self._ended) > NUM_ENDED:
                self._forget(next(iter(self._ended)))
            try:
                self.on_end(trace)
            except Exception:  # noqa: BLE001 - what is told of a request must not harm it, or another
                _log.exception("the end of %s could not be told", trace.request_id)

    def _forget(self, request_id: str) -> None:
        trace = self._ended.pop(request_id)
        others = [other for other in self._by_client[trace.client_id] if other is not trace]
        if others:
            self._by_client[trace.client_id] = others
        else:
            del self._by_client[trace.client_id]

    # -- what people ask

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_ended(self) -> int:
        """Of all times."""
        return self._num_ended

    def find(self, name: str) -> Sequence[Trace]:
        """The newest `MAX_FOUND` requests of this id: the client's, which names one for each prompt of a body, or one
        request's own."""
        own = self._running.get(name) or self._ended.get(name)
        return (own,) if own is not None else tuple(self._by_client.get(name, ())[-MAX_FOUND:])

    def oldest_running(self, count: int) -> list[Trace]:
        return list(islice(self._running.values(), count))

    def last_ended(self, count: int) -> list[Trace]:
        """The newest last."""
        newest = deque(islice(reversed(self._ended.values()), count))
        newest.reverse()
        return list(newest)
