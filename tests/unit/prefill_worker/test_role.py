"""Prefill's role in virtual time, beside its driver; decode has a driver and no role."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from kvtransfer.protocol.messages import Commit
from prefill_worker.events import Event, HandedOff, PromptEnded, PromptStarted
from router.policy.recovery import Fault, failure
from tandem.core.errors import DrainingError, HandoffError, InternalError, InvalidRequestError, TandemError
from tandem.core.identity import WorkerKey
from tandem.core.sampling import SampledToken, SampleRow, SamplingParams
from tandem.worker.batch import SchedulerLimits
from tandem.worker.request import AttemptFailed, AttemptSpec, TokenSampled
from tests.support import driver_world
from tests.support.driver_world import KEY, RECEIVER, SENDER
from tests.support.imports import HEAVY, loaded_by
from tests.support.link import LinkSpec
from tests.support.node import SESSION, NodeSpec
from tests.support.prefill_node import ANSWER_S, RESEND_S, PrefillNode
from tests.support.scripted_model import LAYOUT, sample, token_of
from tests.support.step_runner import StepTime

LATENCY_S, STEP_S = 1 / 64, 2.0
SPEC = NodeSpec(8, SchedulerLimits(4, 64, 64, 4), StepTime(STEP_S, 0.0))
TOKEN = SampledToken(token_of(0, 0, 0))


class Prefill(PrefillNode):
    """`commits` are those that it has sent, and whether again."""

    cluster: World

    def __init__(self, world: World) -> None:
        self.commits: list[tuple[Commit, bool]] = []
        self.error: TandemError | None = None  # in place of each token
        super().__init__("prefill-0", SENDER, SPEC, kernel=world.kernel, cluster=world, link=world.link)

    def core_parts(self) -> dict[str, Any]:
        return super().core_parts() | {"sample": self._sample}

    def _sample(self, logits: Any, rows: Sequence[Sequence[SampleRow]]) -> list[list[SampledToken | TandemError]]:
        error = self.error
        return sample(logits, rows) if error is None else [[error for _ in of_one] for of_one in rows]

    def commit(self, commit: Commit, *, again: bool) -> None:
        self.commits.append((commit, again))
        if self.cluster.commits_arrive:
            super().commit(commit, again=again)


class World(driver_world.World):
    sending: Prefill  # type: ignore[assignment]

    def __init__(self, prefill: type[Prefill] = Prefill) -> None:
        super().__init__(LinkSpec(latency_s=LATENCY_S, bytes_per_s=1e18))
        self.sending = prefill(self)
        self.events: list[Event] = []

    def hear(self, worker: Any, event: Event) -> None:
        self.events.append(event)

    def start(self, **fields: Any) -> None:
        spec = {"key": KEY, "priority": 0, "prompt_ids": tuple(range(10)), "params": SamplingParams()}
        self.sending.start(AttemptSpec(**spec | fields), RECEIVER)

    def errors(self) -> list[Any]:
        return [event.error for event in self.events if isinstance(event, AttemptFailed)]

    def check_rest(self) -> None:
        """In the end nothing is held."""
        self.kernel.run(10_000)
        self.sending.check_rest()


def test_a_prompt_is_computed_and_handed_off_in_virtual_time() -> None:
    world = World()
    begun_s = world.now_s
    world.start()
    world.sending.attach(world.grant((5, 2, 7)))
    world.kernel.run_until(lambda: len(world.events) == 2)
    assert world.events == [PromptStarted(KEY, 0), TokenSampled(KEY, 0, 0, TOKEN, None)]
    assert (world.now_s, world.sending.commits) == (begun_s + STEP_S, [])
    world.kernel.run_until(lambda: world.sending.commits)
    assert world.now_s == begun_s + STEP_S + 2 * LATENCY_S, "its last write has ended"
    ((commit, again),) = world.sending.commits
    assert (commit.pages, [t.token_id for t in commit.first_tokens], again) == ((5, 2, 7), [TOKEN.token_id], False)
    world.check_rest()
    (done,) = world.events[2:]
    assert isinstance(done, HandedOff)
    # Its first layer was written when half of the step was over.
    assert (done.stats.handoff_s, done.stats.exposed_s) == (STEP_S / 2 + 4 * LATENCY_S, 4 * LATENCY_S)
    assert (done.stats.num_extents, done.stats.num_bytes) == (6, 6 * LAYOUT.extent_bytes)
    assert (done.work.compute_s, done.work.num_computed_tokens) == (STEP_S, 10)
    assert world.sending.counters.num_prompt_tokens_computed == 10


class OfFewBytes(Prefill):
    extent_bytes = LAYOUT.extent_bytes


def test_layers_of_few_bytes_go_together() -> None:
    world = World(OfFewBytes)
    world.start()
    world.sending.attach(world.grant((5, 2, 7)))
    world.check_rest()
    done = world.events[-1]
    assert isinstance(done, HandedOff)
    # All was written when the step was over, and decode had it as soon as if its first layer had gone before.
    assert (done.stats.handoff_s, done.stats.exposed_s) == (4 * LATENCY_S, 4 * LATENCY_S)
    assert (done.stats.num_extents, done.stats.num_bytes) == (6, 6 * LAYOUT.extent_bytes)


def test_a_commit_that_nobody_answers_is_sent_again_and_then_given_up_by_the_clock_that_was_given() -> None:
    world = World()
    world.commits_arrive = False
    world.start()
    world.sending.attach(world.grant())
    commits = world.sending.commits
    world.kernel.run_until(lambda: commits)
    committed_s = world.now_s
    world.kernel.run_until(world.errors)
    assert world.now_s - committed_s == pytest.approx(ANSWER_S)
    assert [again for _, again in commits] == [False] + [True] * (len(commits) - 1)
    assert len(commits) >= ANSWER_S / RESEND_S - 1
    world.check_rest()


def test_a_prompt_that_ends_with_its_first_token_is_not_handed_off() -> None:
    world = World()
    world.start(params=SamplingParams(max_tokens=1))
    world.check_rest()
    started, token, ended = world.events
    assert isinstance(started, PromptStarted)
    assert isinstance(token, TokenSampled)
    assert token.ended is not None
    assert isinstance(ended, PromptEnded)
    assert (ended.key, ended.work.compute_s) == (KEY, STEP_S)
    assert not world.receiving.num_arrived


@pytest.mark.parametrize(
    ("error", "num_kept"), [(InternalError("not finite"), 0), (InvalidRequestError("no token is left"), 2)]
)
def test_others_find_no_page_that_may_be_wrong_and_keep_what_only_the_request_is_to_blame_for(
    error: TandemError, num_kept: int
) -> None:
    world = World()
    world.sending.error = error
    world.start()
    assert world.kernel.run_until(world.errors) == [error]
    world.check_rest()
    assert world.sending.scheduler.pool.counts().cached == num_kept


def test_what_cannot_be_taken_ends_with_an_error_and_leaves_nothing() -> None:
    world = World()
    world.start(prompt_ids=(5, 100))
    world.kernel.run_until(world.errors)
    world.sending.is_draining = True
    world.start()
    world.kernel.run_until(lambda: len(world.events) == 2)
    world.sending.core.refuse(SESSION, KEY, InvalidRequestError("top_p is 2"))
    assert [type(error) for error in world.errors()] == [InvalidRequestError, DrainingError, InvalidRequestError]
    assert len(world.events) == 3
    world.check_rest()


def test_a_start_that_cannot_be_read_changes_nothing_of_an_attempt_that_goes_on() -> None:
    world = World()
    world.start()
    world.kernel.run_until(lambda: world.events)
    world.sending.core.refuse(SESSION, KEY, InvalidRequestError("top_p is 2"))
    assert world.events == [PromptStarted(KEY, 0)]
    assert KEY in world.sending.core.jobs


def test_the_end_of_another_routers_session_ends_nothing_of_this_one() -> None:
    world = World()
    core, runner = world.sending.core, world.sending.runner
    world.start()
    world.kernel.run_until(lambda: world.events)
    runner.submit(lambda: core.session_ended(SESSION + 1))
    world.kernel.run_until(lambda: len(world.events) == 2)
    assert isinstance(world.events[1], TokenSampled)
    assert KEY in core.jobs
    runner.submit(lambda: core.session_ended(SESSION))
    world.kernel.run_until(lambda: KEY not in core.jobs)
    world.check_rest()


def test_a_decode_worker_that_has_exited_is_named_as_such_before_it_has_granted_anything() -> None:
    """Else the router would avoid prefill, which has the pages, and try the dead one again."""
    world = World()
    world.start()
    world.kernel.run_until(lambda: world.events)
    world.sending.decode_ended(RECEIVER)
    (error,) = world.kernel.run_until(world.errors)
    assert isinstance(error, HandoffError)
    assert (error.reason, error.retryable) == ("receiver_exited", True)
    prefill, decode = WorkerKey("prefill-0", SENDER), WorkerKey("decode-0", RECEIVER)
    end = failure(error, prefill, prefill, decode)
    assert (end.fault, end.worker, end.is_exit_proven) == (Fault.DIED, decode, True)


@pytest.mark.processes
def test_neither_torch_nor_grpc_nor_ray_nor_protobuf_comes_along() -> None:
    assert loaded_by("import prefill_worker.role, prefill_worker.sender_driver", *HEAVY) == []
