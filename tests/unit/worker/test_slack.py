"""Prompts are taken by when their first tokens are due: the pure scheduler in virtual time, with scripted steps."""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.policy.first_token import slack_of
from tandem.core.pages import PagePool
from tandem.core.sampling import SamplingParams
from tandem.worker.batch import Batch, SchedulerLimits
from tandem.worker.scheduler import BatchScheduler
from tandem.worker.sequence import Sequence
from tandem.worker.turn import turn_of

PAGE = 32
LIMITS = SchedulerLimits(64, 2048, 512, 1000, saturating_tokens=32)
TOKENS_PER_S = 7500.0  # of prompts that are short
LONG, SHORT = 32_000, 1_500


def seconds(batch: Batch) -> float:
    """What a step takes: 32,000 tokens take 15 s, as each reads all before it, and 1,500 take 0.2 s."""
    return sum(i.num_tokens * (1.168e-4 + 2.2e-8 * (i.start + i.num_tokens / 2)) for i in batch.items)


@dataclass
class Queue:
    """A worker that computes prompts, as they come."""

    slack: bool = True
    is_promoted: bool = False  # decode has pages for each, as it comes
    now_s: float = 0.0
    took_s: dict[str, float] = field(default_factory=dict)  # from arrival to the first token
    steps: list[tuple[set[str], set[str]]] = field(default_factory=list)  # who was computed, and who waited meanwhile

    def run(self, prompts: dict[str, tuple[float, int]]) -> Queue:
        """`prompts`: when each comes, and how long it is."""
        scheduler = BatchScheduler(PagePool(20_000, PAGE), LIMITS, salt=b"m", prefix_cache=False)
        to_come = [(at_s, number, name, num) for number, (name, (at_s, num)) in enumerate(prompts.items())]
        heapq.heapify(to_come)
        here: dict[str, Sequence] = {}
        while to_come or here:
            if not here:
                self.now_s = max(self.now_s, to_come[0][0])
            while to_come and to_come[0][0] <= self.now_s:
                at_s, number, name, num = heapq.heappop(to_come)
                here[name] = self._sequence(name, at_s, number, num)
                scheduler.add(here[name])
                if self.is_promoted:
                    scheduler.promote(here[name])
            batch = scheduler.schedule()
            assert batch.items, "somebody is there, and nobody is computed"
            names = {item.sequence.request_id for item in batch.items}
            self.steps.append((names, here.keys() - names))
            self.now_s += seconds(batch)
            ended = [item.sequence for item in batch.items if item.samples]
            scheduler.apply(batch, [[7]] * len(ended))
            for sequence in ended:
                scheduler.pool.release(scheduler.remove(sequence))
                self.took_s[sequence.request_id] = self.now_s - prompts[sequence.request_id][0]
                del here[sequence.request_id]
        return self

    def _sequence(self, name: str, at_s: float, number: int, num_tokens: int) -> Sequence:
        slack_s = slack_of(num_tokens, TOKENS_PER_S) if self.slack else 0.0
        turn = turn_of(0, at_s, 10.0, slack_s)
        return Sequence(name, 1, 0, turn, number, [1] * num_tokens, num_tokens, SamplingParams())


def two_long_ones(*, with_short: bool) -> dict[str, tuple[float, int]]:
    long = {f"long{n}": (0.001 * n, LONG) for n in range(2)}
    return long | ({f"short{n}": (0.5 + 1.3 * n, SHORT) for n in range(25)} if with_short else {})


@pytest.mark.parametrize("is_promoted", [False, True])
def test_short_prompts_do_not_wait_for_long_ones_which_they_delay_by_little(is_promoted: bool) -> None:
    alone = Queue(is_promoted=is_promoted).run(two_long_ones(with_short=False)).took_s
    assert alone["long0"] == pytest.approx(15, rel=0.05)
    assert alone["long1"] == pytest.approx(30, rel=0.05)
    took_s = Queue(is_promoted=is_promoted).run(two_long_ones(with_short=True)).took_s
    assert max(took_s[name] for name in took_s if name.startswith("short")) <= 1.0
    for name, alone_s in alone.items():
        assert took_s[name] <= 1.25 * alone_s


def test_as_they_come_short_prompts_would_wait_for_all_of_a_long_one() -> None:
    took_s = Queue(slack=False).run(two_long_ones(with_short=True)).took_s
    assert max(took_s.values()) > 20.0
    assert took_s["short0"] > 20.0


@pytest.mark.long
def test_a_stream_of_short_prompts_that_fills_the_worker_delays_a_long_one_by_its_slack_at_most() -> None:
    """For ever, where only length counted."""
    flood = {f"short{n}": (0.2 * n, SHORT) for n in range(600)}
    queue = Queue().run({"long": (0.0, LONG), **flood})
    slack_s = slack_of(LONG, TOKENS_PER_S)
    assert slack_s < queue.took_s["long"] < slack_s + 15 + 2


def test_where_nothing_is_known_of_the_speed_prompts_are_taken_as_they_come() -> None:
    assert slack_of(LONG, 0.0) == 0.0


@pytest.mark.parametrize(("timeout_s", "most_s"), [(None, 16 * 4.0), (100.0, 64.0), (20.0, 12.0), (5.0, 0.0)])
def test_nobody_gives_way_for_longer_than_its_client_waits(timeout_s: float | None, most_s: float) -> None:
    assert slack_of(4000, 1000.0, timeout_s) == pytest.approx(most_s)


@pytest.mark.long
@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 1 << 32), over_s=st.floats(0, 4), is_promoted=st.booleans())
def test_a_prompt_is_overtaken_only_by_shorter_ones_that_come_within_its_slack(
    seed: int, over_s: float, is_promoted: bool
) -> None:
    """At the end of any chunk: whoever came after its slack was over gets none while it waits."""
    rng = random.Random(seed)
    lengths = (1, 30, 100, 300, 1000, 4000)
    prompts = {f"p{number}": (rng.uniform(0, over_s), rng.choice(lengths)) for number in range(40)}
    queue = Queue(is_promoted=is_promoted).run(prompts)
    assert queue.took_s.keys() == prompts.keys()
    for computed, waiting in queue.steps:
        for at_s, num_tokens in (prompts[name] for name in waiting):
            for other_at_s, other_tokens in (prompts[name] for name in computed):
                if other_at_s > at_s:
                    assert other_tokens <= num_tokens
                    assert other_at_s <= at_s + slack_of(num_tokens, TOKENS_PER_S)
