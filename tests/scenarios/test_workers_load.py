"""What workers tell all routers of requests that one of them has sent: at once, whatever step is under way."""

from __future__ import annotations

from tests.support.scripted_router import Ask, Router
from tests.support.waiting import until
from tests.support.worker_pair import SHARED_LOOP, Gate, WorkerPair, prompt_of

pytest_plugins = ["tests.support.worker_pair"]
pytestmark = SHARED_LOOP


def shown(router: Router, side: str) -> tuple[int, int]:
    """Requests that run, wait or come in at a worker, and the tokens of prompts that wait."""
    status = router.statuses[side]
    return status.num_running + status.num_queued + status.num_incoming, status.num_queued_tokens


async def test_every_router_hears_at_once_of_prompts_that_come_during_a_step(pair: WorkerPair) -> None:
    async with Router(pair) as one, Router(pair, "other") as other:
        with Gate(pair.prefill.parts.engine, "forward") as step:
            first = await one.begin(Ask(prompt_of(32)))
            await step.wait()
            second = await one.begin(Ask(prompt_of(48, seed=1)))
            for router in (one, other):
                await router.until(lambda router=router: shown(router, "prefill") == (2, 80), "both prompts")
                await router.until(lambda router=router: shown(router, "decode") == (2, 0), "both reservations")
            assert one.num_commands["prefill"] >= 2
            assert one.num_commands["decode"] == 2
            assert other.num_commands == {"prefill": 0, "decode": 0}
            await other.until(lambda: other.statuses["decode"].num_incoming == 2, "both grants")
        for ask in (first, second):
            await one.finish(ask)
        for router in (one, other):
            for side in ("prefill", "decode"):
                await router.until(lambda r=router, s=side: shown(r, s) == (0, 0), f"rest at {side}")


async def test_a_heartbeat_tells_what_the_last_pages_of_a_batch_have_left(pair: WorkerPair) -> None:
    left = -40 % pair.decode.parts.pool.page_size
    assert left
    async with Router(pair) as router:
        with Gate(pair.decode.parts.engine, "forward") as step:
            ask = await router.begin(Ask(prompt_of(40)))
            await step.wait()
            await router.until(lambda: router.statuses["decode"].unfilled_slots == left, "the slots behind its prompt")
        await router.finish(ask)
        await router.until(lambda: not router.statuses["decode"].unfilled_slots, "an empty batch")


async def test_a_request_that_a_worker_refuses_is_not_left_in_its_load(pair: WorkerPair) -> None:
    async with Router(pair) as router:
        too_long = await router.begin(Ask(prompt_of(5000)))
        await router.heard(too_long, "decode.failed")
        await router.heard(too_long, "prefill.failed")
        for worker in (pair.prefill, pair.decode):
            load = worker.parts.load
            await until(lambda load=load: load.newest, "an empty load", wanted=lambda seen: not seen.num_queued)
