"""Limits a minute: token buckets, of requests and of tokens. Pure.

A bucket holds at most what its limit allows in a minute, and fills at that rate. A request takes one of the requests,
and its prompt of the tokens, when it is let in; its answer's tokens are taken as they are given out, as nobody knows
before how many there will be. So the bucket of tokens may be in debt, and then nothing is let in until that is paid.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

_MINUTE_S = 60.0


class Bucket:
    """One limit. Not thread-safe."""

    def __init__(self, per_minute: int, now_s: float) -> None:
        """Full."""
        self.per_minute = per_minute
        self._level = float(per_minute)  # as of `_at_s`; below 0: debt
        self._at_s = now_s

    def fill(self, per_minute: int, now_s: float) -> float:
        """What is in it now, where the limit is `per_minute` from now on."""
        gained = (now_s - self._at_s) * self.per_minute / _MINUTE_S
        self.per_minute, self._at_s = per_minute, now_s
        self._level = min(float(per_minute), self._level + gained)
        return self._level

    def wait_s(self, wanted: float) -> float:
        """From the last look until so much is in it. What is more than it can hold waits until it is full."""
        return max(0.0, min(wanted, self.per_minute) - self._level) * _MINUTE_S / self.per_minute

    def take(self, num: float) -> None:
        self._level -= num

    @property
    def state(self) -> BucketState:
        """As of the last look."""
        return BucketState(self.per_minute, max(0, math.floor(self._level)), self.wait_s(self.per_minute))


@dataclass(frozen=True, slots=True)
class BucketState:
    """What clients are told of a limit: how much it is, how much is left, and in how many seconds it is full again."""

    per_minute: int
    num_left: int
    full_in_s: float


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one tenant, at one router. 0: any number."""

    requests_per_minute: int
    tokens_per_minute: int

    def share(self, num_routers: int) -> Limits:
        """That of one router, which is never 0 where there is a limit."""
        return Limits(*(math.ceil(limit / num_routers) for limit in (self.requests_per_minute, self.tokens_per_minute)))


class RateLimit:
    """The limits of one tenant at one router. Not thread-safe."""

    def __init__(self, limits: Limits, now_s: float) -> None:
        self._requests = Bucket(limits.requests_per_minute, now_s) if limits.requests_per_minute else None
        self._tokens = Bucket(limits.tokens_per_minute, now_s) if limits.tokens_per_minute else None

    def look(self, limits: Limits, now_s: float) -> None:
        """Take note of what the limits are now, and of the time."""
        self._requests = _filled(self._requests, limits.requests_per_minute, now_s)
        self._tokens = _filled(self._tokens, limits.tokens_per_minute, now_s)

    def wait_s(self, num_prompt_tokens: int) -> float:
        """Seconds until a request with this prompt may come; 0: now. A prompt larger than the limit needs it unused."""
        waits = [0.0]
        if self._requests is not None:
            waits.append(self._requests.wait_s(1))
        if self._tokens is not None:
            waits.append(self._tokens.wait_s(max(1, num_prompt_tokens)))
        return max(waits)

    def take(self, *, num_requests: int = 0, num_tokens: int = 0) -> None:
        if self._requests is not None:
            self._requests.take(num_requests)
        if self._tokens is not None:
            self._tokens.take(num_tokens)

    @property
    def states(self) -> dict[str, BucketState]:
        """By what is limited: `requests`, `tokens`."""
        buckets = {"requests": self._requests, "tokens": self._tokens}
        return {name: bucket.state for name, bucket in buckets.items() if bucket is not None}


def _filled(bucket: Bucket | None, per_minute: int, now_s: float) -> Bucket | None:
    if not per_minute:
        return None
    if bucket is None:
        return Bucket(per_minute, now_s)
    bucket.fill(per_minute, now_s)
    return bucket
