"""Decode workers are struck, and leave, while a draft model proposes: the tokens are those of a run without either.

The same bits, at temperature 0 and 0.8; the undisturbed cluster that says what is right does not speculate.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tandem.rpc.channel import make_channel
from tandem.rpc.v1 import control_pb2, control_pb2_grpc
from tests.scenarios.client import Answer, ask
from tests.scenarios.faults import cases
from tests.scenarios.faults.cases import Case, matrix
from tests.scenarios.faults.report import record
from tests.scenarios.faults.site import (
    ALLOWED,
    CONFIG,
    NOTICE_S,
    Site,
    assert_same,
    site,
    story,
)

pytestmark = pytest.mark.alone

NUM_PROMPT = 60
DRAFTING: dict[str, Any] = {
    **CONFIG,
    # Prompts are handed off, though they are short so that the draft has soon read them.
    "scheduling": {"chunk_size": 32, "local_prefill_tokens": 0, "mixed_pool": False},
    # The model itself with rounded weights: often right, and now and then wrong.
    "speculation": {"draft_model": "embedded", "draft_quantize": "int4", "draft_memory_bytes": 8 << 20},
}
MOVED = [
    Case("decode", "decode.guessed", "stop", streamed, sampling, "drafts")
    for sampling, streamed in (("seeded", True), ("greedy", True), ("seeded", False), ("greedy", False))
]
"""The first in `make test`."""


@pytest.fixture(scope="module")
def shared_drafting_site(undisturbed: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    options: dict[str, Any] = {"config": DRAFTING, "decode_module": "tests.support.untimed_decode_worker"}
    with site(tmp_path_factory.mktemp("drafts"), 1, 2, undisturbed=undisturbed, **options) as found:
        yield found


@pytest.fixture
def drafting_site(shared_drafting_site: Site) -> Site:
    return shared_drafting_site.ready()


@matrix(cases.of_drafts())
def test_a_decode_worker_struck_while_a_draft_proposes_changes_no_bit(
    drafting_site: Site, case: Case, request: pytest.FixtureRequest
) -> None:
    prompt = story(str(case), NUM_PROMPT)
    expected = drafting_site.expected(prompt, case.fields)
    before = right_drafts(drafting_site)
    outcome = drafting_site.strike(case, prompt)
    record(request, case, recovery_s=outcome.recovery_s, saw=outcome.saw)
    assert_same_bits(outcome.answer, expected)
    drafting_site.check_in_time(case, outcome)
    freed_s = drafting_site.check_freed(case)
    record(request, case, freed_s=freed_s)
    if case.point != "decode.guessed":  # where a proposal was right
        after = right_drafts(drafting_site)
        assert any(after[name] > before[name] for name in before.keys() & after.keys())


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=str(case), marks=[pytest.mark.faults] if n else []) for n, case in enumerate(MOVED)],
)
def test_a_request_moves_in_the_midst_of_a_step_that_finds_proposals_right(drafting_site: Site, case: Case) -> None:
    """Its worker is told to leave meanwhile, and goes on with the step when the request is somewhere else."""
    prompt = story(f"moved {case}", NUM_PROMPT)
    expected = drafting_site.expected(prompt, case.fields)
    before = right_drafts(drafting_site)
    points = drafting_site.points
    points.arm_any(case.point, "hold", case.nth)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask, drafting_site.cluster.url, prompt, streamed=case.streamed, **case.fields)
        name = points.wait_hit_by_any(case.point)
        leaving = drafting_site.process(name)
        asyncio.run(drain(leaving.facts["address"]))
        (other,) = before.keys() - {name, "prefill-0"}
        try:
            drafting_site.cluster.wait_for(lambda: right_drafts(drafting_site)[other] > before[other], f"it at {other}")
            points.go(name, case.point)
            answer = asked.result()
            drafting_site.check_baseline(ALLOWED * NOTICE_S)
        finally:
            leaving.end()
    assert_same_bits(answer, expected)


def assert_same_bits(answer: Answer, expected: Answer) -> None:
    """The tokens, and their log-probabilities to the last bit."""
    assert_same(answer, expected)
    assert answer.logprobs == expected.logprobs


def right_drafts(found: Site) -> dict[str, int]:
    """Of each worker: tokens that its draft proposed, and that came."""
    return {name: status.right_drafts for name, status in found.cluster.statuses().items()}


async def drain(address: str) -> None:
    """Tell a worker that it is to leave, as the supervisor does."""
    async with make_channel(address) as channel:
        stub = control_pb2_grpc.WorkerControlStub(channel)
        await stub.Drain(control_pb2.DrainWorkerRequest(), timeout=10)
