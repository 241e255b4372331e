"""Pools that are hardly large enough, at both roles: whatever is asked of them, all ends, without a second attempt.

Real cores in virtual time (`tests.support.handoff_world`). Steps take as long as they like, workers are chosen at
random, grants and commits come late. Nothing may wait for ever, however small the pools and whatever the priorities
and the order of arrival.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decode_worker.events import GrantMade
from kvtransfer.protocol.messages import AttemptKey, Grant
from prefill_worker.events import HandedOff
from router.policy.route import RequestFacts, Route, Why, Wishes
from router.policy.snapshot import Snapshot
from router.request.request import Request
from tandem.core.pages import PagePool
from tandem.core.sampling import SamplingParams
from tandem.worker.batch import Batch, SchedulerLimits
from tandem.worker.request import AttemptSpec
from tandem.worker.scheduler import BatchScheduler
from tests.support.decode_node import DecodeNode
from tests.support.handoff_world import World, WorldSpec
from tests.support.link import LinkSpec
from tests.support.node import Node, NodeSpec
from tests.support.prefill_node import PrefillNode
from tests.support.scripted_model import PAGE
from tests.support.step_runner import StepTime

NUM_REQUESTS = 10


@dataclass(frozen=True, slots=True)
class AnyTime:
    """Steps of any length."""

    rng: random.Random

    def of(self, _: Batch) -> float:
        return self.rng.random() * 0.05


@pytest.mark.long
@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1 << 32),
    num_prefills=st.integers(1, 2),
    num_decodes=st.integers(1, 2),
    slack=st.tuples(st.integers(0, 8), st.integers(0, 8)),
    seqs=st.integers(1, 4),
    cache=st.booleans(),
    share=st.sampled_from([0.01, 0.5, 0.75, 1.0]),
    cancels=st.sampled_from([0.0, 0.2]),
    ageing_s=st.sampled_from([0.0, 2.5, 1000.0]),
    window=st.sampled_from([(0, 0), (0, 0), (1, 0), (5, 0), (9, 0), (5, 1), (9, 3)]),
)
def test_whatever_comes_all_end(
    seed: int, num_prefills: int, num_decodes: int, slack: tuple[int, int], seqs: int, cache: bool, share: float,
    cancels: float, ageing_s: float, window: tuple[int, int],
) -> None:  # fmt: skip
    """Pools from just one largest request on; random prompts (some begin alike), priorities, delays and cancels."""
    seen, num_windowed = window
    limits = [
        SchedulerLimits(seqs, 16, 8, 100, share, window=seen, num_windowed=num_windowed) for share in (share, 1.0)
    ]
    rng = random.Random(seed)
    longest = 54 if seen else 14
    sizes = [(rng.randint(1, longest), rng.randint(2, 10), rng.randint(1, min(2, seqs))) for _ in range(NUM_REQUESTS)]
    most_pages = BatchScheduler(PagePool(1, PAGE), limits[0], salt=b"").most_pages
    prefill_pages = max(most_pages(p) for p, _, _ in sizes) + slack[0]
    decode_pages = max(most_pages(p + o) for p, o, _ in sizes) + slack[1]

    def place(snapshot: Snapshot, _: RequestFacts, __: Wishes) -> Route:
        return Route(rng.choice(list(snapshot.prefill)).key, rng.choice(list(snapshot.decode)).key, 0, Why.LOAD)

    def node(num_pages: int, limits: SchedulerLimits) -> NodeSpec:
        return NodeSpec(num_pages, limits, AnyTime(rng), cache, ageing_s)

    link = LinkSpec(fault_share=0.3, faults=["late message"], late_s=0.2)
    world = World(
        WorldSpec(
            num_prefills,
            num_decodes,
            node(prefill_pages, limits[0]),
            node(decode_pages, limits[1]),
            link,
            place=place,
            seed=seed,
        )
    )
    at_s = world.kernel.now_s
    for number, (num_prompt, num_output, num_choices) in enumerate(sizes):
        params = SamplingParams(max_tokens=num_output, ignore_eos=True)
        prompt = (rng.randint(0, 1),) * num_prompt
        at_s += rng.choice([0.0, rng.random() * 0.1])
        world.ask(Request(f"r{number}", prompt, params, at_s, num_choices=num_choices, priority=rng.randint(0, 2)))
        if rng.random() < cancels:
            world.leave(f"r{number}", at_s + rng.random())
    world.run(most_calls=20_000)
    for request in world.requests.values():
        assert request.error is None
        assert request.journal.attempt == 1, "it ended by a time-out"


def test_computed_prompts_without_a_grant_give_way_to_the_one_that_has_it() -> None:
    """Important prompts fill prefill and wait for decode, whose pages wait for an unimportant one."""
    limits = SchedulerLimits(4, 16, 8, 100)
    sides = [NodeSpec(num_pages, limits, StepTime(0.001, 0.0), prefix_cache=False) for num_pages in (4, 5)]
    world = World(WorldSpec(1, 1, *sides, link=LinkSpec(bytes_per_s=1e9)))
    prefill, decode = world.nodes["prefill-0#1"], world.nodes["decode-0#1"]
    assert isinstance(prefill, PrefillNode)
    assert isinstance(decode, DecodeNode)
    grants: list[Grant] = []
    handed_off: list[str] = []

    def hear(_: Node, event: Any) -> None:
        if isinstance(event, GrantMade):
            grants.append(event.grant)
            if event.grant.key.request_id != "low":
                prefill.attach(event.grant)
        elif isinstance(event, HandedOff):
            handed_off.append(event.key.request_id)

    world.hear = hear  # type: ignore[method-assign]
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    low = AttemptSpec(AttemptKey("low", 1), 5, tuple(range(16)), params)
    high = [AttemptSpec(AttemptKey(f"high{n}", 1), 0, tuple(range(n, n + 8)), params) for n in range(2)]

    def begin() -> None:
        decode.reserve(low, 0)
        assert decode.pool.counts().reserved == 4, "no other is granted before it has been handed off"
        for spec in high:
            prefill.start(spec, decode.incarnation)
            decode.reserve(spec, 0)

    def start_low() -> None:
        assert [s.request_id for s in prefill.scheduler.parked] == ["high0", "high1"]
        assert not prefill.pool.num_available
        prefill.start(low, decode.incarnation)

    def hear_of_grant() -> None:
        assert [s.request_id for s in prefill.scheduler.parked] == ["high0", "high1"], "nobody gives way before"
        assert [s.request_id for s in prefill.scheduler.waiting] == ["low"]
        assert [grant.key.request_id for grant in grants] == ["low"]
        prefill.attach(grants[0])

    def look() -> None:
        assert [s.request_id for s in prefill.scheduler.running] == ["low"]
        assert sorted(s.request_id for s in prefill.scheduler.waiting) == ["high0", "high1"]

    for after_s, call in ((0.0, begin), (0.1, start_low), (0.2, hear_of_grant), (0.2015, look)):
        world.kernel.after(after_s, call)
    world.run(most_calls=5_000)
    assert handed_off == ["low", "high0", "high1"]
