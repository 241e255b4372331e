"""The prompts of one body, which end together; without a worker, so that none of them gets anywhere."""

from __future__ import annotations

from pathlib import Path

from router.lifecycle.delta_buffer import DeltaBuffer
from router.lifecycle.prompt_group import PromptGroup
from router.request.request import Request
from router.request.tenant import ANYBODY
from router.server import RouterServer
from tandem.core import config as configuration
from tandem.core.errors import NoWorkerError
from tandem.core.sampling import SamplingParams
from tandem.rpc.guard import RoleGuard
from tandem.rpc.v1.control_pb2 import Membership

NUM_PROMPTS = 50


async def test_each_prompt_hears_once_that_all_are_to_end_however_many_of_them_fail(checkpoint: Path) -> None:
    context = RouterServer(configuration.load(None, {}), model_dir=checkpoint)._context(RoleGuard())
    context.workers.apply(Membership(version=1))  # there is nobody
    now_s = context.clock.now()
    requests = [Request(f"r#{n}", (1, 2), SamplingParams(max_tokens=1), now_s) for n in range(NUM_PROMPTS)]
    context.admission.enter(len(requests), owner=ANYBODY.owner)
    deltas = DeltaBuffer(None)
    group = PromptGroup(requests, context, deltas, kind="completion", taken_s=(now_s, now_s), parent={})
    group.start()
    assert await deltas.take() == []
    assert isinstance(deltas.error, NoWorkerError)
    group.client_gone("the client went away")
    told = [sum("failed" in repr(item) for item in inbox._items) for inbox in group._inboxes]
    assert max(told) <= 1, "else a body of many prompts costs their square"
    assert (context.admission.num_waiting, context.admission.num_sequences) == (0, 0)
