"""A hundred requests through prefill, handoff, decode and router, in virtual time and one thread: nothing is faked that
decides."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pytest

from router.request.request import Request
from tandem.core.errors import WorkerLostError, WorkersDiedError
from tandem.core.identity import Role
from tandem.core.sampling import SamplingParams
from tests.support.handoff_world import DECODE, PREFILL, World, WorldSpec
from tests.support.imports import HEAVY, loaded_by
from tests.support.link import MESSAGE_FAULTS, WRITE_FAULTS, LinkSpec
from tests.support.node import NodeSpec
from tests.support.scripted_model import EOS, VOCAB, scores_of, token_of
from tests.support.step_runner import StepTime
from tests.support.virtual_router import InFlight

NUM_REQUESTS = 100
NUM_TOP = 2  # likeliest tokens at each place of a prompt, for every third request


def make_requests(seed: int, start_s: float) -> list[Request]:
    """Mixed lengths, choices and priorities; some prompts begin alike."""
    rng = random.Random(seed)
    requests = []
    for number in range(NUM_REQUESTS):
        start_s += rng.expovariate(200.0)
        beginning = [rng.randrange(3)] * rng.choice([0, 4, 12])
        prompt = [*beginning, *(rng.randrange(VOCAB) for _ in range(rng.randint(1, 44)))]
        params = SamplingParams(seed=rng.randrange(1 << 32), max_tokens=rng.randint(1, 24))
        choices = rng.choice([1, 1, 1, 2, 3])
        requests.append(
            Request(
                f"r{number}",
                tuple(prompt),
                params,
                start_s,
                num_choices=choices,
                priority=rng.randrange(3),
                num_prompt_logprobs=NUM_TOP if number % 3 == 0 else -1,
            )
        )
    return requests


def serve(
    spec: WorldSpec,
    *,
    num_cancels: int = 0,
    crashes: dict[str, float] | None = None,
    cuts: Sequence[tuple[str, float, float]] = (),
) -> World:
    world, rng = World(spec), random.Random(spec.seed)
    start_s = world.kernel.now_s
    requests = make_requests(spec.seed, start_s)
    for request in requests:
        world.ask(request)
    for request in rng.sample(requests, num_cancels):
        world.leave(request.request_id, request.arrived_s + rng.random() * 0.5)
    for worker_id, after_s in (crashes or {}).items():
        world.crash(worker_id, start_s + after_s)
    for worker_id, after_s, lasts_s in cuts:
        world.cut(worker_id, start_s + after_s, lasts_s)
    return world.run()


def tokens(world: World) -> dict[str, list[list[int]]]:
    return {name: request.tokens for name, request in world.requests.items()}


@cache
def undisturbed(seed: int) -> dict[str, list[list[int]]]:
    return tokens(serve(WorldSpec(seed=seed)))


def expected(request: Request, choice: int) -> list[int]:
    """What the scripted model says, to its end."""
    output: list[int] = []
    while len(output) < request.sampling.max_tokens and EOS not in output:
        output.append(token_of(request.sampling.seed, choice, len(output)))
    return output


def check_prompt_scores(request: InFlight) -> None:
    """Each token's once, whoever computed the prompt, in however many attempts."""
    if (scores := request.journal.prompt_scores) is not None:
        assert scores.tokens == scores_of(request.request.prompt_ids, NUM_TOP), request.request.request_id


def check_tokens(world: World) -> None:
    """Whoever stayed has what an undisturbed cluster gives; who left, or saw two workers die, its beginning."""
    calm = undisturbed(world.spec.seed)
    for name, request in world.requests.items():
        if request.error is not None:
            assert isinstance(request.error, WorkersDiedError), (name, request.error)
            assert len(request.recovery.losses.died) == 2, (name, request.error)
        if request.is_cancelled or request.error is not None:
            assert all(there[: len(here)] == here for here, there in zip(request.tokens, calm[name], strict=True))
        else:
            assert request.tokens == calm[name], name
            check_prompt_scores(request)
        assert not request.journal.dropped["disagreed"]


@pytest.mark.long
def test_a_hundred_requests_end_with_their_tokens_and_leave_nothing() -> None:
    world = serve(WorldSpec(seed=1))
    assert len(world.requests) == NUM_REQUESTS
    for in_flight in world.requests.values():
        request = in_flight.request
        assert in_flight.journal.attempt == 1
        check_prompt_scores(in_flight)
        assert in_flight.tokens == [expected(request, choice) for choice in range(request.num_choices)]
    assert not world.count
    for role in (Role.PREFILL, Role.DECODE):
        assert all(node.runner.num_steps for node in world.of_role(role)), "the load is spread"
    assert all(node.counters.num_prompt_tokens_cached for node in world.of_role(Role.PREFILL))


@pytest.mark.long
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.faults) for seed in (2, 3))])
def test_faults_cancels_and_crashes_change_no_token_and_leave_nothing(seed: int) -> None:
    spec = WorldSpec(seed=seed, link=LinkSpec(fault_share=0.03), mixed_pool_tokens=12)
    world = serve(spec, num_cancels=8, crashes={"prefill-0": 0.2, "decode-1": 0.5})
    check_tokens(world)
    assert any(request.journal.attempt > 1 for request in world.requests.values())
    assert sum(request.is_cancelled for request in world.requests.values())


@pytest.mark.long
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.faults) for seed in (1, 2))])
def test_streams_that_break_again_and_again_cost_no_request(seed: int) -> None:
    """Nobody dies; most requests lose a worker, some lose two before the first one is heard again."""
    cuts = [("decode-0", 0.1, 0.2), ("decode-1", 0.2, 0.2), ("prefill-1", 0.25, 0.1), ("decode-0", 0.45, 0.3)]
    world = serve(WorldSpec(seed=seed), cuts=cuts)
    assert [request.error for request in world.requests.values() if request.error] == []
    check_tokens(world)
    assert any(request.num_doubts for request in world.requests.values())
    assert not any(request.recovery.losses.died for request in world.requests.values())


@pytest.mark.long
def test_a_request_whose_workers_stay_out_of_reach_ends_with_an_error_that_may_be_tried_again() -> None:
    world = serve(WorldSpec(seed=1, num_decode=3), cuts=[("decode-0", 0.1, 9.0), ("decode-1", 0.2, 9.0)])
    ended = [request for request in world.requests.values() if request.error is not None]
    assert ended
    for request in ended:
        assert isinstance(request.error, WorkerLostError), request.error
        assert request.error.retryable
        assert "nothing has told whether they died" in request.error.message
        assert request.num_doubts


@pytest.mark.long
@pytest.mark.parametrize("fault", [*MESSAGE_FAULTS, *WRITE_FAULTS])
def test_each_fault_alone_happens_and_is_survived(fault: str) -> None:
    world = serve(WorldSpec(seed=1, link=LinkSpec(fault_share=0.05, faults=[fault])))
    assert world.count[fault]
    check_tokens(world)


@pytest.mark.long
def test_decode_with_few_pages_preempts_and_ends_all_the_same() -> None:
    world = serve(WorldSpec(seed=1, decode=replace(DECODE, num_pages=26)))
    check_tokens(world)
    assert sum(node.counters.num_preemptions for node in world.of_role(Role.DECODE))


def test_who_found_no_page_goes_on_when_a_fence_frees_some_though_nothing_else_happens() -> None:
    """Its pages are in quarantine: their request was cancelled, and their writer died."""
    slow = replace(PREFILL, step_time=StepTime(0.002, 0.01))
    world = World(WorldSpec(num_prefill=1, num_decode=1, prefill=slow, decode=replace(DECODE, num_pages=8)))
    start_s = world.kernel.now_s
    endless = SamplingParams(max_tokens=20, ignore_eos=True)
    world.ask(Request("grows", (1, 2, 3, 4), endless, start_s))
    world.ask(Request("leaves", tuple(range(5, 20)), SamplingParams(max_tokens=3), start_s + 0.001))
    world.crash("prefill-0", start_s + 0.15)
    world.leave("leaves", start_s + 0.155)
    seen = []
    decode = world.nodes["decode-0#1"]
    world.kernel.at(start_s + 0.5, lambda: seen.append((decode.pool.counts(), decode.scheduler.running[0].num_output)))
    world.run()
    ((counts, num_output),) = seen
    assert (counts.quarantined, counts.free) == (4, 0)
    assert num_output < 20, "it stands still"
    assert world.requests["grows"].tokens == [[token_of(0, 0, position) for position in range(20)]]


@pytest.mark.long
@pytest.mark.parametrize(
    ("is_split", "window", "num_windowed"),
    [
        pytest.param(*each, id="-".join(map(str, (name, *each[1:]))), marks=marks)
        for name, is_split in (("split", True), ("colocated", False))
        for window, num in ((1, 0), (6, 0), (13, 0), (6, 2), (13, 1))
        for each in [(is_split, window, num)]
        for marks in [[] if is_split is (num > 0) else pytest.mark.faults]  # each window once
    ],
)
def test_where_tokens_see_a_window_pages_behind_it_are_never_missed(
    window: int, num_windowed: int, is_split: bool
) -> None:
    """Few pages, preemptions, crashes, late and lost messages; the model reads all that its tokens see, and no more."""

    def windowed(spec: NodeSpec, num_pages: int) -> NodeSpec:
        limits = replace(spec.limits, chunk_size=8, max_num_batched_tokens=24, window=window, num_windowed=num_windowed)
        return replace(spec, num_pages=num_pages, limits=limits)

    # A request has 4, 6 and 10 pages at most; of mixed models 32 and 30, with 20 of the layers that see all.
    num_pages = 32 if num_windowed else 4 + window
    spec = WorldSpec(
        2 if is_split else 0,
        prefill=windowed(PREFILL, 40 if num_windowed else 20),
        decode=windowed(DECODE, num_pages),
        link=LinkSpec(fault_share=0.03),
        mixed_pool_tokens=12 if is_split else 0,
        seed=window,
    )
    crashes = {"decode-1": 0.5} | ({"prefill-0": 0.2} if is_split else {})
    world = serve(spec, num_cancels=8, crashes=crashes)
    check_tokens(world)
    assert any(request.journal.attempt > 1 for request in world.requests.values())
    assert sum(node.counters.num_preemptions for node in world.of_role(Role.DECODE))
    assert sum(node.counters.num_prompt_tokens_cached for node in world.nodes.values())


@pytest.mark.long
def test_the_same_seed_gives_the_same_run() -> None:
    spec = WorldSpec(seed=5, link=LinkSpec(fault_share=0.03))
    first, second = (serve(spec, num_cancels=5, crashes={"prefill-1": 0.3}) for _ in range(2))
    assert (first.kernel.now_s, first.kernel.num_run) == (second.kernel.now_s, second.kernel.num_run)
    assert (first.count, tokens(first)) == (second.count, tokens(second))


CODE = """
import sys
sys.path.insert(0, "tests/unit/worker")
import test_virtual_cluster
world = test_virtual_cluster.serve(test_virtual_cluster.WorldSpec(seed=1))
assert all(request.is_over for request in world.requests.values())
"""


@pytest.mark.processes
def test_none_of_it_needs_torch_grpc_ray_protobuf_or_nixl() -> None:
    assert loaded_by(CODE, *HEAVY, "asyncio") == []
