"""The pools that placement reads are at all times what the sessions say, whatever happens to them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvtransfer.layout import LayoutId
from kvtransfer.wire import protocols_to_proto
from router.policy.pool import ALONE, Share
from router.policy.snapshot import Link
from router.policy.worker_load import WorkerLoad
from router.request.events import Event
from router.request.mailbox import Mailbox
from router.workers.known_pages import KnownPages
from router.workers.registry import WorkerRegistry
from router.workers.session import SessionState, WorkerSession
from tandem.core.clock import VirtualClock
from tandem.core.errors import WorkerLostError
from tandem.core.identity import Role, WorkerKey
from tandem.core.metrics import RouterMetrics
from tandem.core.pages import model_salt, page_keys, pages_for
from tandem.core.protocols import Protocols
from tandem.core.step_times import NO_PROMPTS, PromptSteps
from tandem.rpc.v1.common_pb2 import (
    ROLE_DECODE,
    ROLE_PREFILL,
    CachedPages,
    Layout,
    PageCounts,
    TierReport,
    TierStatus,
    WorkerInfo,
    WorkerStatus,
)
from tandem.rpc.v1.common_pb2 import PromptSteps as PromptStepsMessage
from tandem.rpc.v1.control_pb2 import Member, Membership
from tandem.rpc.v1.decode_pb2 import DecodeEvents
from tandem.rpc.v1.prefill_pb2 import HandoffDone, PrefillEvent, PrefillEvents

NAMES = {"prefill-0": ROLE_PREFILL, "prefill-1": ROLE_PREFILL, "decode-0": ROLE_DECODE, "decode-1": ROLE_DECODE}
names, requests = st.sampled_from(sorted(NAMES)), st.sampled_from("ab")
SEQS = {"prefill-0": 64, "prefill-1": 64, "decode-0": 9, "decode-1": 100}
PAGE = 16


class Registry(WorkerRegistry):
    """Its sessions have no streams; a test says what comes on them."""

    version = 0

    def __init__(self) -> None:
        self.clock, self.router_metrics = VirtualClock(), RouterMetrics()
        super().__init__(
            lease_s=1.0, metrics=self.router_metrics, earlier_max_num_seqs=64, clock=self.clock, begin=lambda _: None
        )
        self.states: dict[str, str] = {}
        self.lives: dict[str, int] = {}

    def push(self, *, colocated: bool = False) -> None:
        self.version += 1
        members = [
            Member(worker_id=n, incarnation=str(self.lives.get(n, 1)), role=NAMES[n], address="a:1", state=state)
            for n, state in self.states.items()
        ]
        self.apply(Membership(version=self.version, members=members, colocated=colocated))

    def of(self, name: str) -> WorkerSession | None:
        return self._sessions.get(WorkerKey(name, str(self.lives.get(name, 1))))

    def hear(self, name: str, **status: Any) -> None:
        session = self.of(name)
        if session is not None:
            make: Any = PrefillEvents if session.is_prefill else DecodeEvents
            session.receive(make(status=WorkerStatus(**status)))

    def counted(self, name: str) -> dict[tuple[str, ...], float]:
        """The values of a counter, by those of its labels."""
        samples = (sample for metric in self.router_metrics.registry.collect() for sample in metric.samples)
        return {tuple(sample.labels.values()): sample.value for sample in samples if sample.name == name}

    def greet(self, name: str, *, page_size: int = PAGE, max_context: int = 100) -> None:
        session = self.of(name)
        if session is not None and session.state is SessionState.CONNECTING:
            info = WorkerInfo(worker_id=name, incarnation=session.key.incarnation, role=NAMES[name], transport="ucx")
            info.layout.CopyFrom(Layout(page_size=page_size, dtype="float32"))
            info.max_context, info.max_num_seqs = max_context, SEQS[name]
            info.protocols.CopyFrom(protocols_to_proto(Protocols()))
            session._greet(info)


def scanned(registry: WorkerRegistry, role: Role) -> dict[WorkerKey, WorkerLoad]:
    ready = [session for session in registry.sessions() if session.takes_requests and session.role is role]
    return {session.key: session.load() for session in ready}


class Cluster(RuleBasedStateMachine):
    """Workers join, are met, report, get requests, drain, are lost and leave, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.registry = Registry()
        self.late: list[WorkerSession] = []  # sessions that attempts may still know

    @initialize()
    def all_are_met(self) -> None:
        self.registry.states = dict.fromkeys(NAMES, "ready")
        self.registry.push()
        for name in NAMES:
            self.registry.greet(name)

    @rule(name=names, state=st.sampled_from(["starting", "ready", "ready", "draining", "failed"]))
    def membership_says(self, name: str, state: str) -> None:
        self._remember(name)
        self.registry.states[name] = state
        self.registry.push()

    @rule(name=names, restarts=st.booleans())
    def leaves(self, name: str, restarts: bool) -> None:
        self._remember(name)
        if self.registry.states.pop(name, None) is not None and restarts:
            self.registry.lives[name] = self.registry.lives.get(name, 1) + 1
            self.registry.states[name] = "ready"
        self.registry.push()

    @rule(name=names, page_size=st.sampled_from([PAGE, 32]), max_context=st.sampled_from([0, 50, 100]))
    def is_met(self, name: str, page_size: int, max_context: int) -> None:
        self.registry.greet(name, page_size=page_size, max_context=max_context)

    @rule(
        name=names,
        running=st.integers(0, 3),
        tokens=st.integers(0, 300),
        free=st.integers(0, 50),
        leaving=st.booleans(),
    )
    def reports(self, name: str, running: int, tokens: int, free: int, leaving: bool) -> None:
        pages = PageCounts(free=free, cached=1)
        self.registry.hear(name, num_running=running, num_queued_tokens=tokens, pages=pages, draining=leaving)

    @rule(name=names, request=requests, computes=st.booleans())
    def gets(self, name: str, request: str, computes: bool) -> None:
        session = self.registry.of(name)
        if session is not None and session.takes_requests:
            mailbox: Mailbox[Event] = Mailbox()
            session.hold(request, mailbox, 40, computes=computes)

    @rule(name=names, request=requests, steps=st.booleans())
    def takes_up(self, name: str, request: str, steps: bool) -> None:
        if (session := self.registry.of(name)) is not None:
            session.note_taken_up(request, steps=steps)

    @rule(name=names, request=requests, computes=st.booleans(), steps=st.booleans())
    def serves(self, name: str, request: str, computes: bool, steps: bool) -> None:
        """From its beginning to its end, with a look after each step."""
        self.gets(name, request, computes)
        self.pools_are_what_a_scan_finds()
        self.takes_up(name, request, steps)
        self.pools_are_what_a_scan_finds()
        self.ends(name, request)

    @rule(name=names, request=requests)
    def ends(self, name: str, request: str) -> None:
        if (session := self.registry.of(name)) is not None:
            session.let_go(request)

    @precondition(lambda self: self.late)
    @rule(request=requests)
    def ends_late(self, request: str) -> None:
        """An attempt lets go of a session in whose place there may be another."""
        self.late.pop().let_go(request)

    @rule(name=names)
    def is_lost(self, name: str) -> None:
        session = self.registry.of(name)
        if session is not None and session.state is SessionState.OPEN:
            session._set_state(SessionState.LOST)
            session._tell_lost(Exception())  # type: ignore[arg-type]
            session._set_state(SessionState.CONNECTING)

    def _remember(self, name: str) -> None:
        if (session := self.registry.of(name)) is not None:
            self.late.append(session)

    @invariant()
    def pools_are_what_a_scan_finds(self) -> None:
        registry = self.registry
        snapshot = registry.snapshot()
        by_role = {role: scanned(registry, role) for role in (Role.PREFILL, Role.DECODE)}
        assert {load.key: load for load in snapshot.prefill} == by_role[Role.PREFILL]
        assert {load.key: load for load in snapshot.decode} == by_role[Role.DECODE]
        assert registry.num_places == sum(load.max_num_seqs for load in by_role[Role.DECODE].values())
        decodes = [session for session in registry.sessions() if not session.is_prefill]
        assert registry.num_apart == sum(s.num_sequences for s in decodes if not s.takes_requests)
        assert registry.num_others == sum(load.num_others for load in by_role[Role.DECODE].values())
        limits = [s.info.max_context for s in registry.sessions() if s.takes_requests and s.info.max_context]
        assert registry.max_context() == min(limits, default=None)
        coming = {
            registry._sessions[key].role if key in registry._sessions else Role(key.worker_id.split("-")[0])
            for key in registry._members
            if not any(key in loads for loads in by_role.values())
        }
        assert snapshot.is_prefill_coming == (Role.PREFILL in coming)
        assert snapshot.is_decode_coming == (Role.DECODE in coming)


@pytest.mark.long
async def test_pools_follow_their_sessions() -> None:
    """In a loop: a session that closes asks it to be forgotten soon."""
    run_state_machine_as_test(Cluster, settings=settings(max_examples=60, stateful_step_count=30, deadline=None))


async def test_a_way_is_known_as_long_as_both_its_workers_are_members() -> None:
    registry = Registry()
    registry.states = dict.fromkeys(["prefill-0", "decode-0", "decode-1"], "ready")
    registry.push()
    pairs = [(WorkerKey("prefill-0", "1"), WorkerKey(name, "1")) for name in ("decode-0", "decode-1")]
    registry.links.update(dict.fromkeys(pairs, Link(is_broken=True)))
    assert registry.snapshot().links.keys() == set(pairs)
    registry.lives["decode-1"] = 2
    registry.push()
    assert registry.snapshot().links.keys() == {pairs[0]}


async def test_the_speed_of_prefill_is_learnt_from_its_steps() -> None:
    registry = Registry()
    registry.states = {"prefill-0": "ready"}
    registry.push()
    registry.greet("prefill-0")
    registry.hear("prefill-0", prompt_tokens_computed=9000, busy_s=90.0)  # it may be of long ago
    assert not registry.snapshot().prefill_tokens_per_s
    registry.event_seen(HandoffDone(compute_s=0.5, num_computed_tokens=500))  # beside another, in the same steps
    registry.hear("prefill-0", prompt_tokens_computed=10_000, busy_s=90.5)
    assert registry.snapshot().prefill_tokens_per_s == 2000.0
    registry.hear("prefill-0", prompt_tokens_computed=10_000, busy_s=90.5)
    registry.hear("prefill-0", prompt_tokens_computed=11_000, busy_s=91.5)
    assert 1000.0 < registry.snapshot().prefill_tokens_per_s < 2000.0


async def test_guesses_are_counted_by_who_made_them() -> None:
    registry = Registry()
    registry.states = dict.fromkeys(["decode-0", "decode-1"], "ready")
    registry.push()
    for name in registry.states:
        registry.greet(name)
    registry.hear("decode-0", guesses=5, right_guesses=2)
    registry.hear("decode-1", drafts=40, right_drafts=30)
    registry.hear("decode-1", guesses=1, drafts=44, right_drafts=33)
    metrics = registry._metrics
    for counter, expected in (
        (metrics.guesses, {"lookup": 6.0, "draft": 44.0}),
        (metrics.right_guesses, {"lookup": 2.0, "draft": 33.0}),
    ):
        samples = next(iter(counter.collect())).samples
        assert {s.labels["source"]: s.value for s in samples if s.name.endswith("_total")} == expected


async def test_what_prompts_take_in_a_decode_workers_steps_is_as_it_says() -> None:
    registry = Registry()
    registry.states = dict.fromkeys(["decode-0", "decode-1"], "ready")
    registry.push()
    for name in registry.states:
        registry.greet(name)
    registry.hear("decode-0", prompt_steps=PromptStepsMessage(num_tokens=96, step_s=0.01, token_s=0.002))
    registry.hear("decode-1")  # of an earlier version, or its targets leave no time
    found = {worker.key.worker_id: worker.prompt_steps for worker in registry.snapshot().decode}
    assert found == {"decode-0": PromptSteps(96, 0.01, 0.002), "decode-1": NO_PROMPTS}


async def test_what_reading_from_tiers_costs_is_learnt() -> None:
    """In prompt tokens that prefill computes meanwhile."""
    registry = Registry()
    registry.states = {"prefill-0": "ready"}
    registry.push()
    registry.greet("prefill-0")
    registry.hear("prefill-0")
    registry.hear("prefill-0", prompt_tokens_computed=1000, busy_s=0.5)

    def costs(name: str = "prefill-0") -> tuple[float, float]:
        return registry.snapshot().read_costs(WorkerKey(name, "1"))

    def reads(num: int, host_s: float, disk_s: float) -> tuple[float, float]:
        tiers = [
            TierStatus(name="host", read=num, read_s=host_s),
            TierStatus(name="disk", read=2 * num, read_s=disk_s),
        ]
        registry.hear("prefill-0", tiers=TierReport(tiers=tiers))
        return costs()

    guess, other_guess = costs()
    assert 0 < guess == other_guess < 1
    assert reads(1000, 70.0, 500.0) == (guess, guess), "of before this router came"
    now = 1100, 70.0 + 100 * PAGE * 0.00005, 500.0 + 200 * PAGE * 0.0002
    for _ in range(2):
        assert reads(*now) == pytest.approx((0.1, 0.4)), "each tier by itself"
    registry.clock.advance(31.0)
    assert reads(*now) == (guess, guess), "a slow disk is not avoided for ever"
    reads(1200, 70.0 + 200 * PAGE * 0.00005, now[2])
    assert costs("prefill-1") == (guess, guess), "each worker by itself"
    disk = TierStatus(name="disk", read=2500, read_s=now[2] + 100 * PAGE * 0.0002)
    registry.hear("prefill-0", tiers=TierReport(tiers=[disk]))
    assert costs() == pytest.approx((0.4, 0.4), rel=0.01), "of one tier alone, that"


async def test_the_batch_of_a_worker_that_does_not_tell_counts_as_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SEQS, "decode-0", 0)
    registry = Registry()
    registry.states = dict.fromkeys(["decode-0", "decode-1"], "ready")
    registry.push()
    for name in registry.states:
        registry.greet(name)
        registry.hear(name)
    assert registry.num_places == 64 + 100


def test_a_worker_that_is_gone_takes_its_tiers_along() -> None:
    pages, worker, layout = KnownPages(), WorkerKey("prefill-0", "1"), LayoutId("ab" * 32, "float32", 1, 1, 8, 16)
    prompt = list(range(40))
    keys = page_keys(prompt, 16, model_salt(layout.weights_sha256))
    news = CachedPages(is_first=True, came=keys[0][:8], tier_came=b"".join(key[:8] for key in keys))
    pages.hear(worker, news)
    prefix = pages.prefix(layout, prompt, "")
    assert (prefix.num_ready(worker), prefix.num_stored(worker), prefix.most_tokens) == (16, 16, 32)
    pages.hear(worker, CachedPages(tier_went=keys[1][:8]))
    assert pages.prefix(layout, prompt, "").num_stored(worker) == 0
    pages.hear(worker, CachedPages(is_first=True, tier_came=keys[0][:8]))
    assert pages.prefix(layout, prompt, "").num_stored(worker) == 16
    assert pages.prefix(layout, prompt, "").num_near(worker) == 0
    pages.hear(worker, CachedPages(near_came=keys[0][:8]))
    assert pages.prefix(layout, prompt, "").num_near(worker) == 16
    pages.hear(worker, CachedPages(near_went=keys[0][:8]))
    assert pages.prefix(layout, prompt, "").num_near(worker) == 0
    pages.hear(worker, CachedPages(near_came=keys[0][:8]))
    pages.lose(worker)
    pages.hear(worker, CachedPages(tier_came=keys[0][:8]))
    assert pages.prefix(layout, prompt, "").num_near(worker) == 0
    pages.lose(worker)
    assert not pages.prefix(layout, prompt, "")


async def test_what_a_worker_had_counted_before_this_router_came_tells_nothing() -> None:
    registry = Registry()
    registry.states = {"decode-0": "ready"}
    registry.push(colocated=True)
    registry.greet("decode-0")
    registry.hear("decode-0", chunk_tokens=1000, chunk_s=500.0)
    assert not registry.snapshot().prefill_tokens_per_s
    registry.hear("decode-0", chunk_tokens=1100, chunk_s=500.25)
    assert registry.snapshot().prefill_tokens_per_s == pytest.approx(400)


def first_word(worker_id: str) -> PrefillEvents:
    """What a worker says first on a stream: who it is, and how it is."""
    hello = WorkerInfo(worker_id=worker_id, incarnation="1", role=ROLE_PREFILL, transport="ucx")
    hello.protocols.CopyFrom(protocols_to_proto(Protocols()))
    status = WorkerStatus(transfer_bytes=1000, prompt_tokens_computed=50)
    return PrefillEvents(events=[PrefillEvent(hello=hello)], status=status)


async def test_what_a_worker_had_sent_before_this_router_came_counts_for_its_transport() -> None:
    registry = Registry()
    registry.states = {"prefill-0": "ready"}
    registry.push()
    session = registry.of("prefill-0")
    assert session is not None
    session.receive(first_word("prefill-0"))
    sent = registry.counted("tandem_kv_transfer_bytes_total")
    assert sent == {("ucx",): 1000}


async def test_what_a_stranger_at_a_workers_address_has_counted_is_not_the_workers() -> None:
    registry = Registry()
    registry.states = {"prefill-0": "ready"}
    registry.push()
    session = registry.of("prefill-0")
    assert session is not None
    with pytest.raises(WorkerLostError, match="answers as prefill-1"):
        session.receive(first_word("prefill-1"))
    assert not registry.counted("tandem_prompt_tokens_computed_total")
    session.receive(first_word("prefill-0"))
    assert registry.counted("tandem_prompt_tokens_computed_total") == {("prefill",): 50}


def test_of_several_routers_each_takes_the_share_that_the_supervisor_names() -> None:
    registry = Registry()
    registry.push()
    assert registry.snapshot().share == ALONE
    registry.apply(Membership(version=2, num_routers=3, router_number=1))
    assert (registry.snapshot().share, registry.num_routers) == (Share(1, 3), 3)
    registry.apply(Membership(version=3, num_routers=1, router_number=0))
    assert registry.snapshot().share == ALONE


def test_where_an_earlier_supervisor_names_no_share_each_router_draws_one() -> None:
    registries = [Registry() for _ in range(20)]
    for registry in registries:
        registry.apply(Membership(version=1, num_routers=8))
        before = registry.snapshot().share
        registry.apply(Membership(version=2, num_routers=8))
        assert registry.snapshot().share == before, "it keeps it"
    shares = {registry.snapshot().share for registry in registries}
    assert len(shares) > 2
    assert {share.of for share in shares} == {8}


def test_a_reservation_counts_pages_of_decode_alone() -> None:
    registry = Registry()
    registry.states = dict.fromkeys(["prefill-0", "decode-0"], "ready")
    registry.push()
    for name in registry.states:
        registry.greet(name)
        registry.hear(name, pages=PageCounts(free=50))
        session = registry.of(name)
        assert session is not None
        session.hold("a", Mailbox(), 40, computes=False)
    (prefill,), (decode,) = registry.snapshot().prefill, registry.snapshot().decode
    assert prefill.num_available_pages - decode.num_available_pages == pages_for(40, PAGE)
