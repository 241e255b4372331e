"""What clients ask of the pools, and what one worker gives: from counts of routers and workers to loads. Pure.

A load is in *workers*: how many of the pool would have to compute all the time. Counts come as increments, each for
the time since the one before.

- *Prefill*: tokens of prompts to compute, over what one worker computes in a second of work. Of prompts that come, the
  share that lately was in no cache and was not computed by decode counts.
- *Decode*: the larger of output tokens over what one worker generates at the wanted TPOT, and of KV that is held over
  what one has room for. Output tokens are those that are generated, or those that the requests which come will want,
  if that is more: a pool that is too small generates too few.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TypeVar

from tandem.core.identity import Role

#: Of so many seconds rates are taken; the longest two say what is likely, the shortest two what is asked just now.
WINDOWS_S = (4.0, 10.0, 30.0, 90.0)
_NUM_LIKELY, _NUM_RECENT = 2, 2
_SERVED_S = 20.0
_HELD_S = 10.0
#: The standard deviation of a sum of `n` requests is about this over the root of `n`, of the sum: their number is
#: random, and so are their lengths.
_SPREAD = 2.0
#: Seconds of work of which a mean remembers about so many.
_REMEMBERED_S = 300.0
#: Where batches have not differed, so many rows more count as taking as long as all that a step takes now.
_ROWS_GUESSED = 32
#: Where prompts took more of decode's time, it does not tell how long steps take without.
_MOST_PROMPTS = 0.2
_LITTLE = 1e-9
_ROUNDING_S = 1e-6

_Counts = TypeVar("_Counts", "Asked", "Worked")


@dataclass(frozen=True, slots=True)
class Asked:
    """What routers counted, of requests with targets.

    Attributes:
        num_requests: that were let in.
        prompt_tokens: of these, without those that are found in caches, as far as can be told.
        num_ended: requests that ended with all their tokens.
        ended_tokens: of output, of these.
        output_tokens: that were given out.
        num_first, num_first_late: requests that got their first token, and those after their target.
        num_timed, num_timed_late: requests that ended with several tokens, and those slower than their target.
    """

    num_requests: float = 0
    prompt_tokens: float = 0
    num_ended: float = 0
    ended_tokens: float = 0
    output_tokens: float = 0
    num_first: float = 0
    num_first_late: float = 0
    num_timed: float = 0
    num_timed_late: float = 0


@dataclass(frozen=True, slots=True)
class Worked:
    """What one worker counted.

    Attributes:
        num_steps, busy_s: of its model, and what they took.
        prompt_tokens: that it computed.
        output_tokens: that it generated, but for those that prefill samples.
    """

    num_steps: float = 0
    busy_s: float = 0.0
    prompt_tokens: float = 0
    output_tokens: float = 0


def added(one: _Counts, other: _Counts, sign: int = 1) -> _Counts:
    """`one` and `other`; with `sign` -1 what `one` has more."""
    names = [each.name for each in fields(one)]
    return type(one)(*(getattr(one, name) + sign * getattr(other, name) for name in names))


@dataclass(frozen=True, slots=True)
class Held:
    """What waits, or is held, at one moment.

    Attributes:
        waiting_tokens: of prompts, to compute, that wait in routers or at prefill workers.
        kv_tokens: that decode workers hold or have reserved.
        waiting_kv_tokens: of requests that wait for room at decode.
        kv_capacity: tokens for which one decode worker has room; 0: not known.
        max_num_seqs: in a decode worker's batch; 0: not known.
    """

    waiting_tokens: float = 0
    kv_tokens: float = 0
    waiting_kv_tokens: float = 0
    kv_capacity: float = 0
    max_num_seqs: int = 0


@dataclass(frozen=True, slots=True)
class Sample:
    """All that was heard since the sample before.

    Attributes:
        worked: by role, of each worker that was heard and does not warm up.
    """

    asked: Asked
    worked: Mapping[Role, list[Worked]]
    held: Held


@dataclass(frozen=True, slots=True)
class PoolLoad:
    """What is asked of one pool.

    Attributes:
        bound: which figure is the largest, for people.
        certain: workers that are needed at least, as far as chance allows to say.
        likely: workers that are needed by the longer means.
        recent: workers that are needed by the shorter means.
        backlog_s: seconds of one worker that all which waits takes, beyond what may wait.
        num_timed, num_late: requests since the last sample that this pool's target concerns, and that missed it.
        inputs: the figures, for people.
    """

    bound: str
    certain: float
    likely: float
    recent: float
    backlog_s: float = 0.0
    num_timed: float = 0
    num_late: float = 0
    inputs: Mapping[str, float] = field(default_factory=dict)


class Rate:
    """Of requests and of what they ask for, over the last seconds, as of the last that was noted.

    Args:
        longest_s: windows longer than that do not count, but for the first.
    """

    def __init__(self, longest_s: float) -> None:
        self._windows_s = [window_s for window_s in WINDOWS_S if window_s <= max(longest_s, WINDOWS_S[0])]
        # From when and until when each sample counted, its requests and its amount.
        self._samples: deque[tuple[float, float, float, float]] = deque()
        self._noted_s: float | None = None  # `None`: it is not known over which time the next ones will have come

    def note(self, now_s: float, num: float, amount: float) -> None:
        """What has come since the last call."""
        from_s, self._noted_s = self._noted_s, now_s
        if from_s is None or now_s <= from_s:
            return
        self._samples.append((from_s, now_s, num, amount))
        while self._samples[0][1] <= now_s - self._windows_s[-1]:
            self._samples.popleft()

    def pause(self) -> None:
        """The time until the next call of `note` counts as none, and so does what comes with it."""
        self._noted_s = None

    def means(self) -> list[tuple[float, float]]:
        """Requests, and amount a second, of each window that has passed; the last one may be shorter than its name.

        A window begins with a sample, so that it may be longer than its name: it is the time that its samples cover.
        """
        windows_s, found, num, amount, span_s, window = self._windows_s, list[tuple[float, float]](), 0.0, 0.0, 0.0, 0
        is_told = False
        for from_s, to_s, of_num, of_amount in reversed(self._samples):
            num += of_num
            amount += of_amount
            span_s += to_s - from_s
            is_told = False
            while window < len(windows_s) and span_s >= windows_s[window] - _ROUNDING_S:
                found.append((num, amount / span_s))
                window, is_told = window + 1, True
        if found and window < len(windows_s) and not is_told:
            found.append((num, amount / span_s))
        return found

    @property
    def certain(self) -> float:
        """The largest mean, each less what may be chance: a sudden rise is seen at once where many requests show it."""
        return max((mean * max(0.0, 1 - _SPREAD / math.sqrt(num)) for num, mean in self.means() if num), default=0)

    @property
    def likely(self) -> float:
        return max((mean for _, mean in self.means()[-_NUM_LIKELY:]), default=0.0)

    @property
    def recent(self) -> float:
        return max((mean for _, mean in self.means()[:_NUM_RECENT]), default=0.0)


class Recent:
    """The last values of a figure."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._values: deque[tuple[float, float]] = deque()

    def note(self, now_s: float, value: float) -> None:
        self._values.append((now_s, value))
        while self._values[0][0] < now_s - self._seconds:
            self._values.popleft()

    @property
    def least(self) -> float:
        return min((value for _, value in self._values), default=0.0)

    @property
    def most(self) -> float:
        return max((value for _, value in self._values), default=0.0)

    @property
    def sum(self) -> float:
        return sum(value for _, value in self._values)

    @property
    def mean(self) -> float:
        return self.sum / max(1, len(self._values))


class StepTimes:
    """How long a step takes by its rows: a line through what workers told, of which the newest counts most."""

    def __init__(self) -> None:
        self._num = self._rows = self._seconds = self._rows2 = self._products = 0.0

    def note(self, work: Worked) -> None:
        if work.num_steps < 1 or work.busy_s <= 0:
            return
        kept = math.exp(-work.busy_s / _REMEMBERED_S)
        rows, seconds = work.output_tokens / work.num_steps, work.busy_s / work.num_steps
        self._num = self._num * kept + work.num_steps
        self._rows = self._rows * kept + work.num_steps * rows
        self._seconds = self._seconds * kept + work.num_steps * seconds
        self._rows2 = self._rows2 * kept + work.num_steps * rows * rows
        self._products = self._products * kept + work.num_steps * rows * seconds

    @property
    def is_known(self) -> bool:
        return self._rows > 0

    def line(self) -> tuple[float, float]:
        """Seconds of a step without rows, and of each row."""
        rows, seconds = self._rows / self._num, self._seconds / self._num
        spread = max(0.0, self._rows2 / self._num - rows * rows)
        together = self._products / self._num - rows * seconds
        # Where all batches were alike, nothing can be told but by a guess, which weighs as much as a small spread.
        guess, weight = seconds / (rows + _ROWS_GUESSED), (1 + 0.1 * rows) ** 2
        of_row = max(_LITTLE, (together + guess * weight) / (spread + weight))
        return max(0.05 * seconds, seconds - of_row * rows), of_row

    def tokens_per_s(self, tpot_s: float, max_num_seqs: int) -> float:
        """That one worker generates with the largest batch that keeps `tpot_s`.

        Where hardly any does, with the batch of which steps take twice as long as with one row: smaller ones cost
        workers, and help little.
        """
        base_s, of_row_s = self.line()
        rows = max(1.0, (max(tpot_s, 2 * base_s) - base_s) / of_row_s)
        rows = min(rows, max_num_seqs) if max_num_seqs else rows
        return rows / (base_s + rows * of_row_s)


class Demand:
    """What is asked of both pools.

    Args:
        ttft_s, tpot_s: the cluster's targets.
        shrink_delay_s: as the configuration has it: no mean goes over more.
    """

    def __init__(self, ttft_s: float, tpot_s: float, shrink_delay_s: float) -> None:
        self._ttft_s, self._tpot_s = ttft_s, tpot_s
        self._prompts, self._requests = Rate(shrink_delay_s), Rate(shrink_delay_s)
        self._served, self._kv = Recent(min(_SERVED_S, shrink_delay_s)), Recent(min(_HELD_S, shrink_delay_s))
        self._prefill_work = Worked()  # of which the newest counts most
        self._prompts_at = {Role.PREFILL: 0.0, Role.DECODE: 0.0}  # tokens computed, as above
        self._ended = Asked()  # as above
        self._steps = StepTimes()
        self._asked, self._held = Asked(), Held()
        self._heard_s: float | None = None

    def hear(self, sample: Sample, now_s: float) -> None:
        """To be called every few seconds. `now_s`: until when routers have told of what they were asked."""
        asked, before_s = sample.asked, self._heard_s
        self._asked, self._held, self._heard_s = asked, sample.held, now_s
        self._prompts.note(now_s, asked.num_requests, asked.prompt_tokens)
        self._requests.note(now_s, asked.num_requests, asked.num_requests)
        self._kv.note(now_s, sample.held.kv_tokens)
        for work in sample.worked.get(Role.PREFILL, []):
            kept = math.exp(-work.busy_s / _REMEMBERED_S)
            self._prefill_work = added(_scaled(self._prefill_work, kept), work)
        kept = 1.0 if before_s is None else math.exp(-(now_s - before_s) / _REMEMBERED_S)
        self._ended = added(_scaled(self._ended, kept), asked)
        if sample.worked.get(Role.PREFILL):  # else decode computes them all, which says nothing of a share
            for role, tokens in self._prompts_at.items():
                self._prompts_at[role] = kept * tokens + sum(w.prompt_tokens for w in sample.worked.get(role, []))
        for work in sample.worked.get(Role.DECODE, []):
            self._note_steps(work)
        if before_s is not None and now_s > before_s:
            self._served.note(now_s, asked.output_tokens / (now_s - before_s))

    def pause(self) -> None:
        """Nobody tells what is asked: the time until the next sample counts as none."""
        self._prompts.pause()
        self._requests.pause()
        self._heard_s = None

    def _note_steps(self, work: Worked) -> None:
        """Of decode, without what prompts took that it computed: new ones, and those that had lost their pages."""
        prefill, prompts_s = self._prefill_work, 0.0
        if work.prompt_tokens:
            if not prefill.prompt_tokens:
                return
            prompts_s = work.prompt_tokens * prefill.busy_s / prefill.prompt_tokens
        if prompts_s <= _MOST_PROMPTS * work.busy_s:
            self._steps.note(replace(work, busy_s=work.busy_s - prompts_s))

    def of(self, role: Role, num_ready: int) -> PoolLoad | None:
        """What is asked of one pool; `None`: there are no figures yet. `num_ready`: of its workers."""
        return self._of_prefill(num_ready) if role is Role.PREFILL else self._of_decode()

    def _of_prefill(self, num_ready: int) -> PoolLoad | None:
        work = self._prefill_work
        if work.prompt_tokens <= 0 or work.busy_s <= 0:
            return None
        of_one = work.prompt_tokens / work.busy_s
        computed = sum(self._prompts_at.values())
        share = self._prompts_at[Role.PREFILL] / computed if computed else 1.0
        certain, likely, recent = (share * rate / of_one for rate in _rates(self._prompts))
        waiting_s = self._held.waiting_tokens / of_one
        return PoolLoad(
            bound="uncached prompt tokens",
            certain=certain,
            likely=likely,
            recent=recent,
            backlog_s=max(0.0, waiting_s - num_ready * self._ttft_s / 2),
            # While prompts wait for decode's pages and places, that is what makes first tokens late.
            num_timed=0 if self._held.waiting_kv_tokens else self._asked.num_first,
            num_late=0 if self._held.waiting_kv_tokens else self._asked.num_first_late,
            inputs={
                "prompt_tokens_per_s": likely * of_one,
                "tokens_per_s_of_one": of_one,
                "waiting_tokens": self._held.waiting_tokens,
                "share_of_prefill": share,
            },
        )

    def _of_decode(self) -> PoolLoad | None:
        held, ended = self._held, self._ended
        loads: list[tuple[str, float, float, float]] = []
        inputs: dict[str, float] = {}
        if held.kv_capacity:
            certain, likely = self._kv.least + held.waiting_kv_tokens, self._kv.most + held.waiting_kv_tokens
            likely /= held.kv_capacity
            loads.append(("resident KV", certain / held.kv_capacity, likely, likely))
            inputs |= {"kv_tokens": held.kv_tokens, "kv_tokens_of_one": held.kv_capacity}
            inputs |= {"waiting_kv_tokens": held.waiting_kv_tokens}
        if not self._steps.is_known or not loads:
            return None
        of_one = self._steps.tokens_per_s(self._tpot_s, held.max_num_seqs)
        of_request = ended.ended_tokens / ended.num_ended if ended.num_ended else 0.0
        served = self._served.mean
        certain, likely, recent = (max(served, of_request * rate) for rate in _rates(self._requests))
        loads.append(("output tokens", certain / of_one, likely / of_one, recent / of_one))
        inputs |= {"output_tokens_per_s": likely, "served_tokens_per_s": served, "tokens_per_s_of_one": of_one}
        bound, *_ = max(loads, key=lambda load: load[2])
        return PoolLoad(
            bound=bound,
            certain=max(certain for _, certain, _, _ in loads),
            likely=max(likely for _, _, likely, _ in loads),
            recent=max(recent for _, _, _, recent in loads),
            num_timed=self._asked.num_timed,
            num_late=self._asked.num_timed_late,
            inputs=inputs,
        )


def _rates(rate: Rate) -> tuple[float, float, float]:
    """Certain, likely, recent."""
    return rate.certain, rate.likely, rate.recent


def _scaled(counts: _Counts, by: float) -> _Counts:
    return type(counts)(*(by * getattr(counts, each.name) for each in fields(counts)))
