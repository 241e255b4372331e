"""Prefill's core in one thread, on a virtual clock: role, driver and protocol as they are, a script for all around."""

from __future__ import annotations

import subprocess
import sys
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from kvtransfer.digest import read_from
from kvtransfer.extents import ArenaShape, Descriptor
from kvtransfer.layout import LayoutId
from kvtransfer.protocol import sender_events as ev
from kvtransfer.protocol.attempts import SenderLimits
from kvtransfer.protocol.messages import AttemptKey, Commit, CommitPart, Grant
from kvtransfer.transports.events import PeerId, WriteCompleted, WriteHandle, WritePosted
from prefill_worker.events import Event, HandedOff, HandoffStats, PromptEnded, PromptStarted
from prefill_worker.role import PrefillRole
from prefill_worker.sender_driver import SenderDriver
from router.policy.recovery import Fault, failure
from tandem.core.clock import VirtualClock
from tandem.core.errors import DrainingError, HandoffError, InvalidRequestError
from tandem.core.identity import WorkerKey
from tandem.core.pages import PagePool
from tandem.core.sampling import SampledToken, SamplingParams
from tandem.worker.counters import WorkerCounters
from tandem.worker.load import LoadReport
from tandem.worker.pacing import Pacing
from tandem.worker.request import AttemptFailed, AttemptSpec, RequestLimits, TokenSampled
from tandem.worker.scheduler import BatchScheduler, SchedulerLimits

PAGE, NUM_PAGES, NUM_LAYERS, SESSION = 4, 8, 2, 3
LAYOUT = LayoutId("ab" * 32, "float32", num_layers=NUM_LAYERS, num_kv_heads=1, head_dim=2, page_size=PAGE)
SHAPE = ArenaShape(NUM_LAYERS, NUM_PAGES, LAYOUT.extent_bytes)
SENDER, RECEIVER = "prefill-0#1", "decode-0#1"
KEY = AttemptKey("request", 1)
PROMPT = tuple(range(10))
LEASE_S, RESEND_S, ANSWER_S = 60.0, 1.0, 5.0
TOKEN = SampledToken(7, None)


class World:
    """The core, and what a worker has around it. What the driver tells the role waits in an inbox, as in a worker."""

    def __init__(self) -> None:
        self.clock = VirtualClock(1000.0)
        self.pool = PagePool(NUM_PAGES, PAGE)
        limits = SchedulerLimits(max_num_seqs=4, max_num_batched_tokens=64, chunk_size=64, queue_bound=4)
        self.scheduler = BatchScheduler(self.pool, limits, salt=b"m", prefix_cache=True)
        arena = np.random.default_rng(3).integers(0, 255, SHAPE.num_bytes, dtype=np.uint8)
        self.driver = SenderDriver(
            incarnation=SENDER,
            layout=LAYOUT,
            shape=SHAPE,
            read_extent=read_from(memoryview(arena), SHAPE),
            limits=SenderLimits(
                lease_margin_s=0.1,
                write_timeout_s=10.0,
                resend_s=RESEND_S,
                answer_timeout_s=ANSWER_S,
                grace_s=1.0,
                quarantine_cap_pages=8,
            ),
            callbacks=self,
            write=self.write,
            peer=lambda _: (PeerId(RECEIVER), SHAPE),
            clock=self.clock,
        )
        self.is_draining = False
        self.counters = WorkerCounters()
        self.role = PrefillRole(
            worker_id="prefill-0",
            scheduler=self.scheduler,
            driver=self.driver,
            emit=lambda events: [self.told.append((session, e)) for session, of in events.items() for e in of],
            limits=RequestLimits(vocab_size=100, max_context=64, eos=frozenset({99}), max_choices=2),
            num_layers=NUM_LAYERS,
            sample=lambda _, rows: [[TOKEN for _ in of_one] for of_one in rows],
            counters=self.counters,
            load=LoadReport(self.scheduler, lambda: None, lambda: None),
            pacing=Pacing(),
            clock=self.clock,
            is_draining=lambda: self.is_draining,
        )
        self.told: list[tuple[int, Event]] = []
        self.posted: list[WriteHandle] = []
        self.commits: list[tuple[Commit, bool]] = []
        self.due_s: float | None = None
        self._inbox: deque[Callable[[], None]] = deque()

    @property
    def events(self) -> list[Event]:
        assert all(session == SESSION for session, _ in self.told)
        return [event for _, event in self.told]

    # -- a router, and decode's word

    def start(self, **fields: Any) -> None:
        spec = AttemptSpec(**{"key": KEY, "priority": 0, "prompt_ids": PROMPT, "params": SamplingParams()} | fields)
        self.driver.open(KEY, -(-len(spec.prompt_ids) // PAGE), RECEIVER)
        self.role.start(SESSION, spec, RECEIVER)
        self.run_inbox()

    def attach(self) -> None:
        grant = Grant("grant", KEY, 1, RECEIVER, LAYOUT, (5, 2, 7), LEASE_S, capability=b"proof")
        self.driver.attached(KEY, grant, self.clock.now() + LEASE_S)
        self.role.grant_attached(KEY)
        self.role.attach(KEY)

    def run_inbox(self) -> None:
        while self._inbox:
            self._inbox.popleft()()

    # -- the runner, and a model that takes its time

    def step(self, takes_s: float) -> None:
        batch = self.scheduler.schedule()
        on_layer = self.role.before_forward(batch)
        for layer in range(NUM_LAYERS):
            self.clock.advance(takes_s / NUM_LAYERS)
            on_layer(layer)
        self.scheduler.apply(batch, self.role.sample(batch, None))
        self.role.after_step(batch)
        self.run_inbox()

    # -- the transport

    def write(
        self, peer: PeerId, descriptors: Sequence[Descriptor], tag: bytes, *, may_post: Callable[[], bool]
    ) -> None:
        handle = WriteHandle(len(self.posted), peer, tag, sum(d.num_bytes for d in descriptors))
        self.posted.append(handle)

        def post() -> None:
            assert may_post()
            self.driver.on_transport(WritePosted(handle))

        self._inbox.append(post)

    def complete_writes(self) -> None:
        for handle in self.posted:
            self.driver.on_transport(WriteCompleted(handle))
        self.run_inbox()

    def pass_time(self) -> None:
        """To the next deadline."""
        assert self.due_s is not None
        self.clock.advance(max(0.0, self.due_s - self.clock.now()))
        self.driver.tick()
        self.run_inbox()

    # -- the driver's callbacks

    def commit_part(self, part: CommitPart) -> None: ...

    def commit(self, commit: Commit, *, again: bool) -> None:
        self.commits.append((commit, again))

    def confirm_idle(self, idle: ev.ConfirmIdle) -> None: ...

    def succeeded(self, key: AttemptKey, stats: HandoffStats) -> None:
        self._inbox.append(lambda: self.role.handed_off(key, stats))

    def failed(self, failure: ev.Fail) -> None:
        error = HandoffError(failure.detail, reason=failure.reason.value)
        self._inbox.append(lambda: self.role.handoff_failed(failure.key, error))

    def quarantine(self, pages: tuple[int, ...]) -> None:
        self._inbox.append(lambda: self.role.quarantine(pages))

    def release(self, pages: tuple[int, ...]) -> None:
        self._inbox.append(lambda: self.role.release(pages))

    def closed(self, key: AttemptKey) -> None:
        self._inbox.append(lambda: self.role.closed(key))

    def replace_self(self, num_quarantined: int) -> None:
        raise AssertionError(num_quarantined)

    def deadline(self, deadline_s: float | None) -> None:
        self.due_s = deadline_s

    def check_rest(self) -> None:
        """Nothing is held any more."""
        counts = self.pool.counts()
        assert (counts.used, counts.quarantined) == (0, 0)
        assert not self.role.jobs
        assert not self.driver.num_handoffs
        self.pool.check()


def test_a_prompt_is_computed_and_handed_off_in_virtual_time() -> None:
    world = World()
    world.start()
    world.attach()
    world.step(takes_s=2.0)
    assert world.events == [PromptStarted(KEY, 0), TokenSampled(KEY, 0, 0, TOKEN, None)]
    world.clock.advance(0.5)
    assert world.commits == []
    world.complete_writes()
    ((commit, again),) = world.commits
    assert (commit.pages, [t.token_id for t in commit.first_tokens], again) == ((5, 2, 7), [7], False)
    world.clock.advance(0.25)
    world.driver.happened(KEY, ev.AckReceived("grant"))
    world.run_inbox()
    (done,) = world.events[2:]
    assert isinstance(done, HandedOff)
    # The world posts behind the step: what both times begin with is the same moment.
    assert (done.stats.handoff_s, done.stats.exposed_s) == (0.75, 0.75)
    assert (done.stats.num_extents, done.stats.num_bytes) == (6, 6 * LAYOUT.extent_bytes)
    assert (done.work.compute_s, done.work.num_computed_tokens) == (2.0, 10)
    assert world.counters.num_prompt_tokens_computed == 10
    world.check_rest()


def test_a_commit_that_nobody_answers_is_sent_again_and_then_given_up_by_the_clock_that_was_given() -> None:
    world = World()
    world.start()
    world.attach()
    world.step(takes_s=1.0)
    world.complete_writes()
    committed_s = world.clock.now()
    while not any(isinstance(event, AttemptFailed) for event in world.events):
        world.pass_time()
    assert world.clock.now() - committed_s == pytest.approx(ANSWER_S)
    assert [again for _, again in world.commits] == [False] + [True] * (len(world.commits) - 1)
    assert len(world.commits) >= ANSWER_S / RESEND_S - 1
    world.check_rest()


def test_a_prompt_that_ends_with_its_first_token_is_not_handed_off() -> None:
    world = World()
    world.start(params=SamplingParams(max_tokens=1))
    world.step(takes_s=1.0)
    started, token, ended = world.events
    assert isinstance(started, PromptStarted)
    assert isinstance(token, TokenSampled)
    assert token.ended is not None
    assert isinstance(ended, PromptEnded)
    assert (ended.key, ended.work.compute_s) == (KEY, 1.0)
    assert not world.posted
    world.check_rest()


def test_what_cannot_be_taken_ends_with_an_error_and_leaves_nothing() -> None:
    world = World()
    world.start(prompt_ids=(5, 100))
    world.is_draining = True
    world.start()
    world.role.refuse(SESSION, KEY, InvalidRequestError("top_p is 2"))
    errors = [event.error for event in world.events if isinstance(event, AttemptFailed)]
    assert [type(error) for error in errors] == [InvalidRequestError, DrainingError, InvalidRequestError]
    assert len(world.events) == 3
    world.check_rest()


def test_a_start_that_cannot_be_read_changes_nothing_of_an_attempt_that_goes_on() -> None:
    world = World()
    world.start()
    world.role.refuse(SESSION, KEY, InvalidRequestError("top_p is 2"))
    assert world.events == []
    assert KEY in world.role.jobs


PROBE = """
import sys
import prefill_worker.role, prefill_worker.sender_driver
print(sorted({'torch', 'grpc', 'ray', 'google.protobuf', 'nixl', 'nixl_cu12'} & set(sys.modules)))
"""


def test_a_decode_worker_that_has_exited_is_named_as_such_before_it_has_granted_anything() -> None:
    """Else the router would avoid prefill, which has the pages, and try the dead one again."""
    world = World()
    world.start()
    world.role.receiver_ended([KEY], RECEIVER)
    (failed,) = [event for event in world.events if isinstance(event, AttemptFailed)]
    assert isinstance(failed.error, HandoffError)
    assert (failed.error.reason, failed.error.retryable) == ("receiver_exited", True)
    prefill, decode = WorkerKey("prefill-0", SENDER), WorkerKey("decode-0", RECEIVER)
    end = failure(failed.error, prefill, prefill, decode)
    assert (end.fault, end.worker, end.is_exit_proven) == (Fault.DIED, decode, True)


@pytest.mark.processes
def test_neither_torch_nor_grpc_nor_ray_nor_protobuf_comes_along() -> None:
    done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
