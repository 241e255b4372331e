"""The workers as the router knows them: the membership, a session with each, and what they report."""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from heapq import nsmallest
from typing import Any

from kvtransfer.layout import LayoutId
from router.policy.gate import Room
from router.policy.losses import Fate
from router.policy.pool import ALONE, Pool, Share
from router.policy.prefix import HeldPrefix
from router.policy.snapshot import Link, Pair, Snapshot, TierReads
from router.request.events import Event, WorkersChanged
from router.request.mailbox import Mailbox
from router.workers import wire
from router.workers.abilities import Abilities, Ability
from router.workers.described import described, mismatches, outlined
from router.workers.known_pages import Foreseen, KnownPages
from router.workers.learnt import Learnt, LearntReads
from router.workers.session import SessionState, WorkerSession
from router.workers.worker_counts import WorkerCounts
from tandem.core.clock import Clock, MonotonicClock
from tandem.core.errors import IncompatibleError
from tandem.core.identity import WORKER_ROLES, Role, WorkerKey
from tandem.core.metrics import RouterMetrics
from tandem.rpc.convert import ROLE_FROM_PROTO
from tandem.rpc.v1.common_pb2 import CachedPages, LinkReport, TierReport, WorkerStatus, WorkSpan
from tandem.rpc.v1.control_pb2 import Member, Membership, PoolSize
from tandem.rpc.v1.decode_pb2 import Admitted, ComputesHere, PromptComputed, WriterSuspected
from tandem.rpc.v1.prefill_pb2 import HandoffDone, LinkChanged, PrefillEnded

_log = logging.getLogger(__name__)

_CONNECTABLE = ("ready", "draining")


class WorkerRegistry:
    """All sessions. Methods run on the router's loop."""

    def __init__(
        self,
        *,
        lease_s: float,
        metrics: RouterMetrics,
        earlier_max_num_seqs: int = 0,
        seed: int | None = None,
        clock: Clock | None = None,
        begin: Callable[[WorkerSession], None] = WorkerSession.start,
    ) -> None:
        """Args:
        earlier_max_num_seqs: sequences in the batch of a worker whose version does not tell it.
        seed: of the share that this router takes where nobody says which one it is; else random.
        begin: begins a session; where it does not connect, messages come by `WorkerSession.receive`.
        """
        self._clock = clock or MonotonicClock()
        self._lease_s = lease_s
        self._metrics = metrics
        self._earlier_max_num_seqs = earlier_max_num_seqs
        self._random = random.Random(seed)
        self._begin = begin
        self._version = -1
        # What others choose now is known to none of several routers: each has a share of its own.
        self._share = ALONE
        # Invariant: has a session for every member that has an address; retired ones stay until they are closed.
        self._sessions: dict[WorkerKey, WorkerSession] = {}
        self._members: dict[WorkerKey, Member] = {}
        self._is_colocated = False  # by the supervisor's word
        self._ended: frozenset[str] = frozenset()  # incarnations whose processes have provably ended, the newest
        # Invariant: have all and only sessions that take requests: their loads, and what each can do.
        self._pools = {role: Pool(role) for role in WORKER_ROLES}
        self._abilities = Abilities()
        self._num_members: Counter[Role] = Counter()
        # Of prefill workers, prompt tokens in a second of their steps. (By the time of a prompt it would be too low: a
        # step may have several of them.)
        self._prefill_speed = Learnt()
        self._chunk_speed = Learnt()  # of decode workers, prompt tokens in a second of steps with chunks of full size
        self._learnt_reads: dict[WorkerKey, LearntReads] = {}  # from the tiers of each worker
        self._tier_reads: dict[WorkerKey, TierReads] = {}
        #: Members that decode workers have found silent beyond lease and grace; for the supervisor.
        #: Each stays while it is a member: whoever kills it may not have heard of it yet.
        self.suspected: set[WorkerKey] = set()
        # What each incarnation had counted when it last reported: the exported counters take the differences.
        self._counted: dict[WorkerKey, WorkerCounts] = {}
        #: Ways between two workers that are slow or broken; whoever learns of it notes it here. A worker that has left
        #: takes its own along.
        self.links: dict[Pair, Link] = {}
        # By prefill worker: the pairs of which it said something in its last report.
        self._reported_links: dict[WorkerKey, frozenset[Pair]] = {}
        self._watchers: set[Mailbox[Event]] = set()
        self.pages = KnownPages()
        #: By which tenants' salts are made; all routers of the cluster have it in common. Empty before it is told.
        self.cache_secret = b""
        # Invariant: this router's sequences at each decode worker that has some and takes no requests, and their sum.
        self._apart: dict[WorkerKey, int] = {}
        self._num_apart = 0
        #: Whether the decode worker that came last computes on a GPU: those without Ray are told so by `--device`.
        self.is_on_gpu = False
        #: Of the pools of workers, as the supervisor told them last; for metrics.
        self.pool_sizes: tuple[PoolSize, ...] = ()
        #: When the supervisor's certificate ends, as it told last; 0: it shows none. For metrics.
        self.supervisor_certificate_expires = 0
        #: Called whenever a worker comes or goes.
        self.on_change: Callable[[], object] = lambda: None
        #: Called whenever a worker has told of its load.
        self.on_report: Callable[[], object] = lambda: None
        #: Called with what a worker has done for an attempt at a request, which may have ended.
        self.on_work: Callable[[str, int, Role, Iterable[WorkSpan]], object] = lambda *_: None

    # -- membership

    def apply(self, membership: Membership) -> bool:
        """Take over a membership, unless it is older than the one that holds; whether it is not."""
        if membership.version < self._version:
            _log.warning("membership %d ignored: %d holds already", membership.version, self._version)
            return False
        self._version = membership.version
        self._take_share(membership)
        self.pool_sizes = tuple(pool for pool in membership.pools if pool.role in ROLE_FROM_PROTO)
        self.supervisor_certificate_expires = membership.certificate_expires
        self.cache_secret = membership.cache_secret
        self._is_colocated = membership.colocated
        members = [member for member in membership.members if member.role in ROLE_FROM_PROTO]
        if unknown := len(membership.members) - len(members):
            _log.error("%d members of unknown roles ignored", unknown)
        before, self._members = self._members, {WorkerKey(m.worker_id, m.incarnation): m for m in members}
        self._ended = frozenset(membership.ended)
        self._num_members = Counter(ROLE_FROM_PROTO[member.role] for member in self._members.values())
        for key, member in self._members.items():
            self._apply_member(key, member)
        self.suspected &= self._members.keys()
        lives = {member.worker_id: member.incarnation for member in members}
        for key in self._sessions.keys() - self._members.keys():
            if key.worker_id in lives:  # it counts no more, whether its end was seen or not
                self._sessions[key].declare_dead(f"{lives[key.worker_id]} has taken its place")
            else:
                self._sessions[key].retire()
                self.load_changed(self._sessions[key])
        self._forget_closed()
        _log.info("membership %d: %d workers; %s", self._version, len(self._members), _changes(before, self._members))
        self._tell_watchers()
        return True

    def _take_share(self, membership: Membership) -> None:
        if membership.HasField("router_number"):
            of = max(1, membership.num_routers)
            self._share = Share(membership.router_number % of, of)
        elif membership.num_routers != self._share.of:  # of an earlier supervisor
            of = max(1, membership.num_routers)
            self._share = Share(self._random.randrange(of), of)

    @property
    def num_routers(self) -> int:
        """That serve the same workers, this one included."""
        return self._share.of

    def _apply_member(self, key: WorkerKey, member: Member) -> None:
        session = self._sessions.get(key)
        if session is not None and not (session.state is SessionState.CLOSED and member.state in _CONNECTABLE):
            if member != session.member:
                session.update(member)
                self.load_changed(session)
            if member.state == "failed":
                session.declare_dead("the supervisor has declared it failed")
        elif member.address and member.state in _CONNECTABLE:
            session = WorkerSession(member, lease_s=self._lease_s, observer=self)
            self._sessions[key] = session
            self._begin(session)

    def _forget_closed(self) -> None:
        for key in [k for k, s in self._sessions.items() if s.state is SessionState.CLOSED and k not in self._members]:
            del self._sessions[key]
            self._counted.pop(key, None)
            self._learnt_reads.pop(key, None)
            self._tier_reads.pop(key, None)
            self._reported_links.pop(key, None)
        for pair in [p for p in self.links if not self._sessions.keys() >= set(p)]:
            del self.links[pair]

    async def close(self) -> None:
        """End all sessions."""
        sessions = list(self._sessions.values())
        for session in sessions:
            session.close("the router is shutting down")
        for session in sessions:
            await session.wait_closed()

    # -- for requests

    def snapshot(self) -> Snapshot:
        """The load of every worker that takes requests, and whether others will; to be used at once."""
        prefill, decode = self._pools[Role.PREFILL], self._pools[Role.DECODE]
        knows_none = self._version < 0  # a router that has just started is told in a moment who there is
        return Snapshot(
            prefill,
            decode,
            is_prefill_coming=knows_none or len(prefill) < self._num_members[Role.PREFILL],
            is_decode_coming=knows_none or len(decode) < self._num_members[Role.DECODE],
            links=self.links,
            prefill_tokens_per_s=self._prefill_tokens_per_s,
            num_prefill_tokens_known=self._prefill_speed.known_from(self._clock.now()),
            tier_reads=self._tier_reads,
            share=self._share,
            is_colocated=self.is_colocated,
        )

    @property
    def is_colocated(self) -> bool:
        """Whether decode workers compute all prompts."""
        return self._is_colocated and not self._pools[Role.PREFILL]

    def room(self, num_places: float, *, is_mixed: bool) -> Room:
        """What the workers can take. `num_places`: of this router; `is_mixed`: decode workers compute prompts too."""
        return Room.of(
            self._pools[Role.PREFILL],
            self._pools[Role.DECODE],
            is_mixed=is_mixed or self.is_colocated,
            tokens_per_s=self._prefill_tokens_per_s,
            num_places=num_places,
            num_routers=self._share.of,
        )

    def known_prefix(self, token_ids: Sequence[int], cache_salt: str) -> HeldPrefix[WorkerKey]:
        """Who holds how much of a prompt's beginning. Costs as much as is found, and one page more."""
        return self.pages.prefix(self._layout, token_ids, cache_salt)

    def foresee(self, workers: Iterable[WorkerKey], token_ids: Sequence[int], cache_salt: str) -> Foreseen:
        """These are about to have the pages of a prompt. For `pages.forget`, once they have told of them."""
        return self.pages.foresee(workers, self._layout, token_ids, cache_salt)

    @property
    def _layout(self) -> LayoutId | None:
        """That of the decode workers. They have two only while the cluster is upgraded; then one is looked for."""
        return next((kv_format.layout for kv_format in self._pools[Role.DECODE].formats), None)

    @property
    def num_others(self) -> int:
        """Requests of other routers at the decode workers, as these say."""
        return self._pools[Role.DECODE].num_others

    @property
    def num_places(self) -> int:
        """Sequences that the batches of all decode workers hold."""
        return self._pools[Role.DECODE].num_places

    @property
    def num_apart(self) -> int:
        """Sequences of this router at decode workers that get nothing new, as they are silent or drain: they have none
        of the places."""
        return self._num_apart

    def session(self, key: WorkerKey) -> WorkerSession:
        """The session of a worker in the current snapshot."""
        return self._sessions[key]

    def fate(self, key: WorkerKey) -> Fate:
        """What has become of a worker that was lost; where that changes, whoever watches is told."""
        if key.incarnation in self._ended:
            return Fate.ENDED
        session = self._sessions.get(key)
        return Fate.HEARD if session is not None and session.is_heard else Fate.UNKNOWN

    def max_context(self) -> int | None:
        """Tokens of prompt and output that every ready worker can hold; `None` where none has said."""
        return self._abilities.max_context

    def check_protocol(self, number: int) -> None:
        """Raises `IncompatibleError` where a worker that takes requests does not speak this number of the protocol."""
        if (spoken := self._abilities.protocol) is not None and spoken < number:
            raise IncompatibleError(
                "the cluster is being upgraded: a worker of the version before does not know all that this request "
                "asks for (a grammar, allowed tokens, bad words, a cache salt or the prompt's log-probabilities); send "
                "it again when all have been replaced",
                retryable=True,
            )

    def watch(self, mailbox: Mailbox[Event]) -> None:
        """From now on `mailbox` gets `WorkersChanged` whenever a worker comes or goes."""
        self._watchers.add(mailbox)

    def unwatch(self, mailbox: Mailbox[Event]) -> None:
        self._watchers.discard(mailbox)

    def _tell_watchers(self) -> None:
        self.on_change()
        for mailbox in self._watchers:
            mailbox.put(WorkersChanged())

    # -- what sessions report (SessionObserver)

    def session_changed(self, session: WorkerSession) -> None:
        self.load_changed(session)
        if session.state is SessionState.LOST:
            self._metrics.workers_lost.labels(session.role).inc()
            self._forget_links(session.key)  # what became of them meanwhile was not heard
            self.pages.lose(session.key)
        elif session.state is SessionState.OPEN:
            if not session.is_prefill:
                self.is_on_gpu = session.info.on_gpu
            self._warn_of_formats(session)
            self._introduce(session)
        elif session.state is SessionState.CLOSED:
            self.pages.lose(session.key)
        if session.state is SessionState.CLOSED and session.key not in self._members:
            # Not at once: the caller may be walking over the sessions.
            asyncio.get_running_loop().call_soon(self._forget_closed)
        self._tell_watchers()

    def readiness_changed(self, session: WorkerSession) -> None:
        self.load_changed(session)
        self._tell_watchers()

    def load_changed(self, session: WorkerSession) -> None:
        if self._sessions.get(session.key) is not session:  # closed, and another has taken its place
            return
        if not session.is_prefill:
            num_apart = 0 if session.takes_requests else session.num_sequences
            self._num_apart += num_apart - self._apart.pop(session.key, 0)
            if num_apart:
                self._apart[session.key] = num_apart
        if session.takes_requests:
            load = session.load()
            self._pools[session.role].put(
                load if load.max_num_seqs else replace(load, max_num_seqs=self._earlier_max_num_seqs)
            )
            self._abilities.put(session.key, Ability(session.info.max_context, session.info.protocols.newest))
        elif session.key in self._abilities:
            self._pools[session.role].discard(session.key)
            self._abilities.put(session.key, None)

    def pages_cached(self, session: WorkerSession, news: CachedPages) -> None:
        if session.state is SessionState.OPEN:
            self.pages.hear(session.key, news)

    def worker_died(self, session: WorkerSession) -> None:
        self._metrics.worker_deaths.labels(session.role).inc()

    def _introduce(self, session: WorkerSession) -> None:
        """Have those connect that will exchange pages with this worker, so that no request waits for it."""
        others = self._connected(Role.DECODE if session.is_prefill else Role.PREFILL)
        others = [other for other in others if other.kv_format == session.kv_format]
        if not session.is_prefill:
            for prefill in others:
                prefill.send(wire.meet([session.info]))
        elif others:
            session.send(wire.meet(decode.info for decode in others))

    def _forget_links(self, prefill: WorkerKey) -> None:
        for pair in [pair for pair in self.links if pair[0] == prefill]:
            del self.links[pair]

    def _warn_of_formats(self, session: WorkerSession) -> None:
        """Log which of the connected workers cannot serve a request together with this one, and why."""
        role = Role.DECODE if session.is_prefill else Role.PREFILL
        if all(kv_format == session.kv_format for kv_format in self._pools[role].formats):
            return
        others = self._connected(role)
        prefill, decode = ([session], others) if session.is_prefill else (others, [session])
        if differing := mismatches(prefill, decode):
            _log.error(
                "worker %s pairs with %d of the %d workers of the other pool: %s",
                session.key,
                len(others) - len(differing),
                len(others),
                "; ".join(difference for pair in differing for difference in pair["differences"]),
            )

    def status_reported(self, session: WorkerSession, status: WorkerStatus) -> None:
        counts = self._counted.get(session.key)
        if counts is None:  # what it has counted by now may be of long ago
            counts = WorkerCounts(self._metrics, session.role, session.info.transport or "unknown")
            self._counted[session.key] = counts
            counts.take(status)
        else:
            before, now_s = counts.take(status), self._clock.now()
            self._chunk_speed.note(status.chunk_tokens - before.chunk_tokens, status.chunk_s - before.chunk_s, now_s)
            if session.is_prefill:
                num_tokens = status.prompt_tokens_computed - before.prompt_tokens_computed
                self._prefill_speed.note(num_tokens, status.busy_s - before.busy_s, now_s)
        if status.HasField("tiers"):
            self._note_reads(session, status.tiers)
        if status.HasField("links"):
            self._note_links(session.key, status.links)
        self.on_report()

    def _note_links(self, prefill: WorkerKey, report: LinkReport) -> None:
        """Take over what a prefill worker says of its links. Of those that it does not name nothing is known."""
        links = {
            (prefill, WorkerKey(link.worker_id, link.incarnation)): Link(link.bytes_per_s or math.inf, link.is_broken)
            for link in report.links
        }
        for pair in self._reported_links.get(prefill, frozenset()) - links.keys():
            self.links.pop(pair, None)
        self._reported_links[prefill] = frozenset(links)
        self.links.update(links)

    def event_seen(self, message: Any) -> None:
        """Measure what no request waits for: it may have ended before."""
        metrics = self._metrics
        match message:
            case HandoffDone():
                metrics.handoff_s.observe(message.handoff_s)
                metrics.exposed_s.observe(message.exposed_s)
            case Admitted():
                metrics.admission_s.observe(message.admission_s)
                admission = WorkSpan(name="admission", begin_s=message.admission_s)
                self.on_work(message.request_id, message.attempt, Role.DECODE, [admission])
            case ComputesHere():
                why = "recovery" if message.attempt > 1 else "colocated" if self.is_colocated else "mixed_pool"
                metrics.local_prefills.labels(why).inc()
            case PromptComputed():
                self.on_work(message.request_id, message.attempt, Role.DECODE, message.spans)
            case WriterSuspected():
                self._writer_suspected(WorkerKey(message.writer_worker_id, message.writer_incarnation))
            case LinkChanged():
                self._link_changed(message)
        if isinstance(message, HandoffDone | PrefillEnded):
            self.on_work(message.request_id, message.attempt, Role.PREFILL, message.spans)
            metrics.prefill_compute_s.observe(message.compute_s)
        if isinstance(message, HandoffDone | PrefillEnded | ComputesHere) and message.attempt > 1:
            metrics.prompt_tokens_recomputed.inc(message.num_computed_tokens)

    def _link_changed(self, message: LinkChanged) -> None:
        """Of two workers that live; `_forget_closed` and `_forget_links` take away what is not heard of any more."""
        prefill = WorkerKey(message.prefill_worker_id, message.prefill_incarnation)
        decode = WorkerKey(message.decode_worker_id, message.decode_incarnation)
        _log.warning(
            "the connection from %s to %s %s", prefill, decode, "is broken" if message.is_broken else "is up again"
        )
        known = self.links.get((prefill, decode), Link())
        self.links[prefill, decode] = replace(known, is_broken=message.is_broken)

    def _note_reads(self, session: WorkerSession, report: TierReport) -> None:
        learnt = self._learnt_reads.setdefault(session.key, LearntReads())
        counted = ((tier.name, tier.read, tier.read_s) for tier in report.tiers)
        self._tier_reads[session.key] = learnt.note(counted, session.info.layout.page_size, self._clock.now())

    @property
    def _prefill_tokens_per_s(self) -> float:
        """Of the workers that compute prompts."""
        return (self._chunk_speed if self.is_colocated else self._prefill_speed).at(self._clock.now())

    def _writer_suspected(self, key: WorkerKey) -> None:
        _log.error("a decode worker suspects the silent writer %s, which must be killed on its node", key)
        self._metrics.writers_suspected.inc()
        member = self._members.get(key)  # none: it has ended, which the decode worker has yet to hear
        if member is not None and ROLE_FROM_PROTO[member.role] is Role.PREFILL:
            self.suspected.add(key)

    # -- for people and tools

    def sessions(self) -> list[WorkerSession]:
        return list(self._sessions.values())

    def _connected(self, role: Role) -> list[WorkerSession]:
        return [s for s in self._sessions.values() if s.state is SessionState.OPEN and s.role is role]

    def outline(self, model: str, most: int) -> dict[str, Any]:
        """What the live page is told each second: `most` workers of each pool, and how many there are."""
        keys: dict[Role, list[WorkerKey]] = {role: [] for role in WORKER_ROLES}
        for key, member in self._members.items():
            keys[ROLE_FROM_PROTO[member.role]].append(key)
        pools = {
            role.value: [outlined(self._members[key], self._sessions.get(key)) for key in nsmallest(most, of_role)]
            for role, of_role in keys.items()
        }
        num_workers = {role.value: len(of_role) for role, of_role in keys.items()}
        return {"model": model, "colocated": self.is_colocated, **pools, "num_workers": num_workers}

    def describe(self, model: str) -> dict[str, Any]:
        """The body of `GET /v1/cluster`."""
        pools: dict[str, list[dict[str, Any]]] = {role.value: [] for role in WORKER_ROLES}
        members = self._members | {key: session.member for key, session in self._sessions.items()}
        for key in sorted(members):
            pools[ROLE_FROM_PROTO[members[key].role]].append(described(members[key], self._sessions.get(key)))
        return {
            "model": model,
            "membership_version": max(self._version, 0),
            "colocated": self.is_colocated,
            **pools,
            "incompatible": mismatches(self._connected(Role.PREFILL), self._connected(Role.DECODE)),
        }


def _changes(before: Mapping[WorkerKey, Member], now: Mapping[WorkerKey, Member]) -> str:
    changed = [f"{key} {m.state}" for key, m in now.items() if key not in before or before[key].state != m.state]
    return ", ".join([*changed, *(f"{key} gone" for key in before if key not in now)]) or "no change"
