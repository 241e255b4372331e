"""Admission: which requests are let in, and when the others should try again. It bounds the queues of both pools.

A request waits for the computation of its prompt. Later it may wait for a place in a decode worker's batch. The workers
keep these queues; admission keeps them short:

- At most `max_waiting` requests wait in either queue. That is for the whole cluster: each router lets its share wait.
- A steady load must not wait for long: for a prompt at most as long as its computation takes, for a place at most a
  quarter of the time that a request takes. Both times are learnt while no request is refused.
- A tenant that has less of a queue than its share, while others wait, is let in whatever they do: a flood of one leaves
  room for each of the others (`router.policy.tenant_queues`).
- Longer queues need *credit*. Where more requests come than are served, a request that would wait for longer costs one
  credit; so does each refusal. When a request ends and none waits, the credit is `max_waiting` again; after a recent
  refusal it grows only a little. So a cluster that was not overloaded takes a burst of `max_waiting` requests, but a
  lasting overload is refused at once instead of being served late. (That is the aim of CoDel: Nichols and Jacobson, ACM
  Queue 2012.)

Admission bounds waiting only. `scheduling.max_num_seqs` bounds the TPOT of a full batch.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable

from router.policy.tenant_queues import TenantQueues
from tandem.core.clock import Clock
from tandem.core.errors import DrainingError, OverloadedError

_MAX_RETRY_AFTER_S = 60.0
_WEIGHT = 1 / 32  # of the newest sample in an average
_SHARE_IN_FRONT_OF_DECODE = 0.25
#: The credit that a request earns by ending while none waits, if one was refused lately; only 1 where a third or more
#: were refused. It is above 1, so that a cluster near its capacity keeps some credit.
_EARNED = 4
_REFUSAL_WINDOW_S = 1.0
#: More come than are served if over this window those that came exceed those that ended by this ratio and this slack.
#: A few dozen clients that wait for their answers before they ask again never do so: only `max_waiting` bounds them.
_RATE_WINDOW_S, _RATE_RATIO, _RATE_SLACK = 5.0, 1.1, 32
#: The ratio must hold over this shorter window too: who comes while a burst is served is not to blame for it.
_TREND_WINDOW_S = 1.0


class Admission:
    """Counts what waits and what is under way. Not thread-safe.

    Each request that `enter` let in calls `leave` when its prompt is being computed (or it ends before), and `end` when
    it has ended; `first_token` in between where one came.
    """

    def __init__(
        self,
        max_waiting: int,
        clock: Clock,
        num_places: Callable[[], float] = lambda: math.inf,
        num_routers: Callable[[], int] = lambda: 1,
    ) -> None:
        """`max_waiting`: at all routers together. `num_places`: of the sequences that all decode workers can have in
        their batches, those of this router. `num_routers`: how many there are now."""
        self._max_waiting = max_waiting
        self._num_routers = num_routers
        self.is_draining = False
        #: Called when a request has left the queue or ended, or the places may have changed.
        self.on_freed: Callable[[], None] = lambda: None
        self._clock = clock
        self._num_places = num_places
        self._tenants = TenantQueues()
        # When those that wait for their prompt's computation came, oldest first.
        self._waiting_since_s: deque[float] = deque()
        self._num_sequences = 0  # of all requests under way
        # Invariant: 0 <= _credit <= max_waiting, as of the last time that it changed
        self._credit = self.max_waiting
        self._last_left_s = self._last_ended_s = -math.inf
        # Since when more sequences are under way than there are places, as last looked at; `None` if there are not, or
        # if there is no decode worker at all, which says nothing of how fast one serves.
        self._full_since_s: float | None = None
        # Time between two requests that left the queue, or ended, while others waited behind: the pools at their limit.
        self._left_gap_s, self._ended_gap_s = _Average(), _Average()
        # From being let in to leaving the queue, to the first token, and to the end; learnt while nobody is refused.
        self._wait_s, self._ttft_s, self._whole_s = _Average(), _Average(), _Average()
        # In the current window of refusals, which the first refusal after the last window opens.
        self._num_refused = self._num_let_in = 0
        self._lately, self._just_now = _Balance(_RATE_WINDOW_S), _Balance(_TREND_WINDOW_S)
        self._refusals_since_s = self._last_refusal_s = -math.inf

    @property
    def max_waiting(self) -> int:
        """Requests that may wait here: a share of the cluster's, which is never 0."""
        return math.ceil(self._max_waiting / self._num_routers())

    @property
    def num_waiting(self) -> int:
        """Requests whose prompts wait for their computation."""
        return len(self._waiting_since_s)

    @property
    def num_sequences(self) -> int:
        """Of all requests under way."""
        return self._num_sequences

    @property
    def num_places(self) -> float:
        """Of the sequences that all decode workers can have in their batches, those of this router."""
        return self._num_places()

    # -- coming in

    def enter(self, num_requests: int = 1, num_choices: int = 1, owner: str = "", weight: float = 1.0) -> None:
        """Take `num_requests` in, all or none, each with `num_choices` sequences. `owner`: their tenant.

        Raises:
            OverloadedError: too many wait; says when to try again.
            DrainingError: the router takes no new requests.
        """
        cost = self._check_of(num_requests, num_choices, owner, weight)
        self._tenants.enter(owner, weight, num_requests)
        self._credit = max(0, min(self._credit, self.max_waiting) - cost)
        self._num_let_in += num_requests
        now_s = self._clock.now()
        self._note_came(now_s, num_requests)
        self._waiting_since_s.extend([now_s] * num_requests)
        self._num_sequences += num_requests * num_choices
        self.look_at_places()

    def check(self, owner: str = "", weight: float = 1.0) -> None:
        """Raises as `enter` does where not even one request would be let in."""
        self._check_of(1, 1, owner, weight)

    def _check_of(self, num_requests: int, num_choices: int, owner: str, weight: float) -> int:
        """As `_check`, but for a tenant that has less than its share of the queue."""
        if not self.is_draining and self._is_below_share(owner, weight, num_requests):
            return 0
        return self._check(num_requests, num_choices)

    def _is_below_share(self, owner: str, weight: float, num_requests: int) -> bool:
        room = min(self.max_waiting, self._room_for_prefill(), self._room_for_decode())
        return self._tenants.is_below_share(owner, weight, num_requests, room)

    def _check(self, num_requests: int, num_choices: int) -> int:
        """The credit that it costs to let them in."""
        if self.is_draining:
            raise DrainingError("the router is shutting down; try another one")
        waiting = self.num_waiting + num_requests
        queued = self._num_sequences + num_requests * num_choices - self._num_places()
        # All prompts of one HTTP request wait together: they are let in where nobody else waits.
        bound = max(self.max_waiting, min(num_requests, self._max_waiting))
        if waiting > bound or queued > bound * num_choices:
            raise self._refusal(f"{self.num_waiting} requests are waiting and the bound is {self.max_waiting}")
        if not self._more_come_than_are_served(num_requests):
            return 0
        excess = min(num_requests, max(0, waiting - self._room_for_prefill(), queued - self._room_for_decode()))
        if excess > min(self._credit, self.max_waiting):
            raise self._refusal("requests come in faster than they are served")
        return math.ceil(excess)

    def _more_come_than_are_served(self, num_requests: int) -> bool:
        now_s = self._clock.now()
        return self._lately.exceeds(now_s, num_requests - _RATE_SLACK) and self._just_now.exceeds(now_s, num_requests)

    def _note_came(self, now_s: float, num_requests: int = 1) -> None:
        for balance in (self._lately, self._just_now):
            balance.came_s.extend([now_s] * num_requests)

    def _refusal(self, why: str) -> OverloadedError:
        now_s = self._clock.now()
        self._note_came(now_s)
        if now_s - self._refusals_since_s > _REFUSAL_WINDOW_S:
            self._refusals_since_s, self._num_refused, self._num_let_in = now_s, 0, 0
        self._last_refusal_s = now_s
        self._num_refused += 1
        self._credit = max(0, min(self._credit, self.max_waiting) - 1)
        return OverloadedError(f"{why}; try again later", retry_after_s=self.retry_after_s())

    def retry_after_s(self) -> float:
        """Whole seconds in which as many are served as wait and were lately refused; at least 1, at most 60.

        If all come back after that long, about as many come each second as are served.
        """
        gap_s = max(self._left_gap_s.value, self._ended_gap_s.value)
        return min(max(1.0, math.ceil((self.num_waiting + self._num_refused) * gap_s)), _MAX_RETRY_AFTER_S)

    def look_at_places(self) -> None:
        """Note since when all places have been taken; called when workers or requests come or go."""
        if not 0 < self._num_places() < self._num_sequences:
            self._full_since_s = None
        elif self._full_since_s is None:
            self._full_since_s = self._clock.now()

    def places_changed(self) -> None:
        """A worker has come or gone."""
        self.look_at_places()
        self.on_freed()

    # -- on its way

    def leave(self, owner: str = "") -> None:
        """One request of this tenant no longer waits for its prompt's computation; only their number counts."""
        if not self._waiting_since_s:
            raise ValueError("nobody is waiting")
        self._tenants.leave(owner)
        now_s, since_s = self._clock.now(), self._waiting_since_s.popleft()
        if not self._is_refusing():
            self._wait_s.add(now_s - since_s)
        if since_s < self._last_left_s:  # it was waiting when the one before it left
            self._left_gap_s.add(now_s - self._last_left_s)
        self._last_left_s = now_s
        self.on_freed()

    def first_token(self, after_s: float) -> None:
        """A request has its first token, `after_s` seconds after it was let in."""
        if not self._is_refusing():
            self._ttft_s.add(after_s)

    def end(self, after_s: float, num_choices: int = 1) -> None:
        """A request with this many sequences has ended, `after_s` seconds after it was let in."""
        now_s, was_full = self._clock.now(), self._full_since_s is not None
        for balance in (self._lately, self._just_now):
            balance.ended_s.append(now_s)
        self.look_at_places()
        if was_full and self._full_since_s is not None:
            self._ended_gap_s.add(now_s - max(self._last_ended_s, self._full_since_s))
        self._last_ended_s = now_s
        self._num_sequences -= num_choices
        self.look_at_places()
        if not self._is_refusing():
            self._whole_s.add(after_s)
        if not self._waiting_since_s and self._num_sequences < self._num_places():
            self._credit = min(self._credit + self._earned(), self.max_waiting)
        self.on_freed()

    def _earned(self) -> int:
        if not self._is_refusing():
            return self.max_waiting
        return 1 if 2 * self._num_refused > self._num_let_in else _EARNED

    def place_in_s(self, num_choices: int = 1) -> float:
        """Until there are so many places in decode's batches for the next request, as far as can be told."""
        num_missing = self._num_sequences + num_choices - self._num_places()
        return max(0.0, num_missing) * self._ended_gap_s.value if self._num_places() else 0.0

    # -- how many may wait

    def _is_refusing(self) -> bool:
        """Whether a request was refused lately, or while the requests that are served now were waiting."""
        return self._clock.now() - self._last_refusal_s < _REFUSAL_WINDOW_S + 2 * self._whole_s.value

    def _room_for_prefill(self) -> float:
        """How many requests leave the queue in the time from there to the first token of one; at least 1."""
        service_s, gap_s = self._ttft_s.value - self._wait_s.value, self._left_gap_s.value
        return max(1.0, service_s / gap_s) if gap_s else math.inf

    def _room_for_decode(self) -> float:
        """How many requests end in a quarter of the time that one takes."""
        gap_s = self._ended_gap_s.value
        return _SHARE_IN_FRONT_OF_DECODE * self._whole_s.value / gap_s if gap_s else math.inf


class _Average:
    """An average that forgets."""

    def __init__(self) -> None:
        self.value = 0.0
        self._is_empty = True

    def add(self, value: float) -> None:
        self.value = value if self._is_empty else self.value + _WEIGHT * (value - self.value)
        self._is_empty = False


class _Balance:
    """When requests came and ended in the last `window_s`; of very many, only the newest."""

    def __init__(self, window_s: float) -> None:
        self.came_s: deque[float] = deque(maxlen=4096)
        self.ended_s: deque[float] = deque(maxlen=4096)
        self._window_s = window_s

    def exceeds(self, now_s: float, num_more: int) -> bool:
        """Whether more came than ended, by `_RATE_RATIO`, if `num_more` are added to those that came."""
        for at_s in (self.came_s, self.ended_s):
            while at_s and at_s[0] < now_s - self._window_s:
                at_s.popleft()
        return len(self.came_s) + num_more > _RATE_RATIO * len(self.ended_s)
