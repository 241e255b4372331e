"""A hundred requests through decode workers alone, in virtual time: each computes its prompts itself."""

from __future__ import annotations

from dataclasses import replace

import pytest
from test_virtual_cluster import NUM_REQUESTS, check_prompt_scores, check_tokens, expected, serve

from tandem.core.identity import Role
from tandem.worker.batch import SchedulerLimits
from tests.support.handoff_world import DECODE, WorldSpec

COLOCATED = WorldSpec(num_prefill=0)


@pytest.mark.long
def test_requests_end_with_their_tokens_and_leave_nothing() -> None:
    world = serve(replace(COLOCATED, seed=1))
    assert len(world.requests) == NUM_REQUESTS
    for in_flight in world.requests.values():
        request = in_flight.request
        assert in_flight.journal.attempt == 1
        check_prompt_scores(in_flight)
        assert in_flight.tokens == [expected(request, choice) for choice in range(request.num_choices)]
    assert not world.count
    assert all(node.runner.num_steps for node in world.of_role(Role.DECODE)), "the load is spread"
    assert all(node.counters.num_prompt_tokens_cached for node in world.of_role(Role.DECODE))


@pytest.mark.long
def test_prompts_are_computed_in_chunks_of_full_size() -> None:
    """Not in the room that steps have: that would take a step for each eight tokens."""
    world = serve(replace(COLOCATED, seed=1))
    for node in world.of_role(Role.DECODE):
        assert not node.counters.num_mixed_steps
        assert node.counters.num_chunk_tokens >= 0.9 * node.counters.num_prompt_tokens_computed
        assert node.counters.chunk_s > 0
        assert node.scheduler.budget.most_tokens(1, 1.0) is not None, "it has learnt how long its steps take"


@pytest.mark.long
def test_where_prefill_workers_compute_prompts_nothing_is_learnt_of_steps() -> None:
    for node in serve(WorldSpec(seed=1)).of_role(Role.DECODE):
        assert node.scheduler.budget.most_tokens(1, 1.0) is None


@pytest.mark.long
@pytest.mark.parametrize("seed", range(4))
def test_cancels_and_deaths_of_decode_workers_change_no_token_and_leave_nothing(seed: int) -> None:
    crashes = {"decode-0": 0.15, "decode-1": 0.5}
    world = serve(replace(COLOCATED, seed=seed, num_decode=3), num_cancels=20, crashes=crashes)
    check_tokens(world)
    assert world.count["crashed decode"] == 2
    assert any(request.journal.attempt > 1 for request in world.requests.values())
    assert sum(request.is_cancelled for request in world.requests.values())


@pytest.mark.long
def test_the_only_decode_worker_dies_and_its_requests_wait_for_the_next() -> None:
    world = serve(replace(COLOCATED, seed=2, num_decode=1), crashes={"decode-0": 0.2})
    assert [request.error for request in world.requests.values() if request.error] == []
    check_tokens(world)
    assert any(request.journal.attempt > 1 for request in world.requests.values())


@pytest.mark.long
@pytest.mark.parametrize("seed", range(2))
def test_streams_that_break_again_and_again_cost_no_request(seed: int) -> None:
    cuts = [("decode-0", 0.1, 0.2), ("decode-1", 0.2, 0.2), ("decode-0", 0.45, 0.3)]
    world = serve(replace(COLOCATED, seed=seed), cuts=cuts)
    assert [request.error for request in world.requests.values() if request.error] == []
    check_tokens(world)


@pytest.mark.long
def test_with_few_pages_workers_preempt_and_end_all_the_same() -> None:
    limits = SchedulerLimits(12, 64, 32, 200, saturating_tokens=32)
    world = serve(replace(COLOCATED, seed=1, decode=replace(DECODE, num_pages=26, limits=limits)))
    check_tokens(world)
    assert sum(node.counters.num_preemptions for node in world.of_role(Role.DECODE))
