"""Streams under way, a fault, its end: what the clients saw, and how long it took until all was as before."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from itertools import pairwise

from tests.hosts.cluster import Asking, HostCluster
from tests.hosts.oracle import assert_right_or_typed_error, expected
from tests.hosts.report import Seen
from tests.scenarios.client import Answer
from tests.scenarios.faults.site import story

NUM_BEFORE, NUM_DURING = 4, 2
PROMPT, TOKENS = 300, 1500
WHOLE_S, IDLE_S = 240.0, 120.0


def strike(
    cluster: HostCluster, fault: str, begin: Callable[[], object], end: Callable[[], object], lasts_s: float
) -> Seen:
    """Strike a cluster that is whole and idle, and wait until it is so again.

    Some requests are under way when the fault begins, others come while it lasts. Every answer has all tokens of the
    model itself, or a typed error behind the first of them. When all is over, as many come as in the beginning. The
    prompts are the same for each fault: the cluster is to keep none.
    """
    before = cluster.incarnations()
    prompts = [story(f"under way {number}", PROMPT) for number in range(NUM_BEFORE + NUM_DURING)]
    right = [expected(prompt, TOKENS) for prompt in prompts]
    streams = [_stream(cluster, prompt) for prompt in prompts[:NUM_BEFORE]]
    streams[0].wait_for_token()
    struck_at = time.time()
    begin()
    assert any(stream.is_under_way for stream in streams), "the fault struck nobody"
    time.sleep(lasts_s / 2)
    streams += [_stream(cluster, prompt) for prompt in prompts[NUM_BEFORE:]]
    time.sleep(lasts_s / 2)
    end()
    ended_at = time.time()
    answers = [stream.answer(timeout_s=240) for stream in streams]
    cluster.wait_ready(WHOLE_S)
    whole_at = time.time()
    cluster.wait_idle(IDLE_S)
    cluster.wait_ready(WHOLE_S)  # some are killed only for pages that were waited for meanwhile
    idle_at = time.time()
    saw = [assert_right_or_typed_error(*each) for each in zip(answers, right, strict=True)]
    afterwards = [_stream(cluster, prompt) for prompt in prompts[:NUM_BEFORE]]
    late = [stream.answer(timeout_s=240) for stream in afterwards]
    saw_afterwards = [assert_right_or_typed_error(*each) for each in zip(late, right, strict=False)]
    cluster.wait_idle(IDLE_S)
    return Seen(
        fault,
        dict(Counter(saw)),
        round(max(longest_wait_s(answer, struck_at) for answer in answers[:NUM_BEFORE]), 2),
        round(whole_at - ended_at, 2),
        round(idle_at - whole_at, 2),
        len(cluster.incarnations() - before),
        dict(Counter(saw_afterwards)),
        round(max(longest_wait_s(answer, idle_at) for answer in late), 2),
    )


def _stream(cluster: HostCluster, prompt: list[int]) -> Asking:
    return cluster.asking(prompt, max_tokens=TOKENS, ignore_eos=True, timeout_s=200.0)


def longest_wait_s(answer: Answer, since: float) -> float:
    """For a token or the end, from a time on."""
    times = [since, *(at for at in (*answer.token_times, answer.ended) if at > since)]
    return max((later - earlier for earlier, later in pairwise(times)), default=0.0)
