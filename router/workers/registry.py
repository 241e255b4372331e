"""The workers as the router knows them: membership from the supervisor, one session each, and what they report."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from kvtransfer.layout import mismatch
from router.policy.snapshot import Snapshot
from router.request.events import Event, WorkersChanged
from router.request.mailbox import Mailbox
from router.workers.session import SessionState, WorkerSession
from tandem.core.identity import WORKER_ROLES, Role, WorkerKey
from tandem.core.metrics import RouterMetrics
from tandem.rpc.convert import ROLE_FROM_PROTO
from tandem.rpc.v1.common_pb2 import WorkerStatus
from tandem.rpc.v1.control_pb2 import Member, Membership
from tandem.rpc.v1.decode_pb2 import WriterSuspected

_log = logging.getLogger(__name__)

_CONNECTABLE = ("ready", "draining")


class WorkerRegistry:
    """All sessions. Methods run on the router's loop."""

    def __init__(self, *, lease_s: float, metrics: RouterMetrics) -> None:
        self._lease_s = lease_s
        self._metrics = metrics
        self._version = -1
        #: That serve the same workers, this one included.
        self.num_routers = 1
        # Invariant: has a session for every member that has an address; retired ones stay until they are closed.
        self._sessions: dict[WorkerKey, WorkerSession] = {}
        self._members: dict[WorkerKey, Member] = {}
        # Invariant: members only. None is taken back while it is one: whoever kills it may not have heard of it yet.
        self._suspected: set[WorkerKey] = set()
        # What each incarnation had counted when it last reported: the exported counters take the differences.
        self._counted: dict[WorkerKey, WorkerStatus] = {}
        self._watchers: set[Mailbox[Event]] = set()
        #: Called whenever a worker comes or goes.
        self.on_change: Callable[[], object] = lambda: None

    # -- membership

    def apply(self, membership: Membership) -> bool:
        """Take over a membership; `False` where it is older than the one that holds."""
        if membership.version < self._version:
            _log.warning("membership %d ignored: %d holds already", membership.version, self._version)
            return False
        self._version, self.num_routers = membership.version, max(1, membership.num_routers)
        members = [member for member in membership.members if member.role in ROLE_FROM_PROTO]
        if unknown := len(membership.members) - len(members):
            _log.error("%d members of unknown roles ignored", unknown)
        self._members = {WorkerKey(m.worker_id, m.incarnation): m for m in members}
        for key, member in self._members.items():
            self._apply_member(key, member)
        self._suspected &= self._members.keys()
        lives = {member.worker_id: member.incarnation for member in members}
        for key in self._sessions.keys() - self._members.keys():
            if key.worker_id in lives:  # the next life begins only when this one has ended
                self._sessions[key].declare_dead(f"{lives[key.worker_id]} has taken its place")
            else:
                self._sessions[key].retire()
        self._forget_closed()
        _log.info("membership %d: %s", membership.version, ", ".join(map(_shown, members)) or "no worker")
        self._tell_watchers()
        return True

    def _apply_member(self, key: WorkerKey, member: Member) -> None:
        session = self._sessions.get(key)
        if session is not None and not (session.state is SessionState.CLOSED and member.state in _CONNECTABLE):
            session.update(member)
            if member.state == "failed":
                session.declare_dead("the supervisor has declared it failed")
        elif member.address and member.state in _CONNECTABLE:
            session = WorkerSession(member, lease_s=self._lease_s, observer=self)
            self._sessions[key] = session
            session.start()

    def _forget_closed(self) -> None:
        for key in [k for k, s in self._sessions.items() if s.state is SessionState.CLOSED and k not in self._members]:
            del self._sessions[key]
            self._counted.pop(key, None)

    async def close(self) -> None:
        """End all sessions."""
        sessions = list(self._sessions.values())
        for session in sessions:
            session.close("the router is shutting down")
        for session in sessions:
            await session.wait_closed()

    # -- for requests

    def snapshot(self) -> Snapshot:
        """The load of every worker that takes requests, and whether others will."""
        ready = [session for session in self._sessions.values() if session.takes_requests]
        ready_keys = {session.key for session in ready}
        coming = {ROLE_FROM_PROTO[member.role] for key, member in self._members.items() if key not in ready_keys}
        return Snapshot(
            prefill=[s.load() for s in ready if s.is_prefill],
            decode=[s.load() for s in ready if not s.is_prefill],
            is_prefill_coming=Role.PREFILL in coming,
            is_decode_coming=Role.DECODE in coming,
        )

    def session(self, key: WorkerKey) -> WorkerSession:
        """Of a worker that is in the current snapshot."""
        return self._sessions[key]

    def max_context(self) -> int | None:
        """Tokens of prompt and output that every ready worker can hold; `None` where none has said."""
        limits = [s.info.max_context for s in self._sessions.values() if s.takes_requests and s.info is not None]
        return min((limit for limit in limits if limit), default=None)

    @contextmanager
    def watched_by(self, mailbox: Mailbox[Event]) -> Iterator[None]:
        """Inside, `mailbox` gets `WorkersChanged` whenever a worker comes or goes."""
        self.watch(mailbox)
        try:
            yield
        finally:
            self.unwatch(mailbox)

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
        if session.state is SessionState.LOST:
            self._metrics.workers_lost.labels(session.role).inc()
        elif session.state is SessionState.OPEN:
            self._warn_of_formats(session)
        elif session.state is SessionState.CLOSED and session.key not in self._members:
            # Not at once: the caller may be walking over the sessions.
            asyncio.get_running_loop().call_soon(self._forget_closed)
        self._tell_watchers()

    def worker_died(self, session: WorkerSession) -> None:
        self._metrics.worker_deaths.labels(session.role).inc()

    def _warn_of_formats(self, session: WorkerSession) -> None:
        """Say which of the connected workers this one cannot serve a request with, and why."""
        others = [s for s in self._sessions.values() if s.state is SessionState.OPEN and s.role != session.role]
        prefill, decode = ([session], others) if session.is_prefill else (others, [session])
        if differing := _mismatches(prefill, decode):
            _log.error(
                "worker %s pairs with %d of the %d workers of the other pool: %s",
                session.key,
                len(others) - len(differing),
                len(others),
                "; ".join(difference for pair in differing for difference in pair["differences"]),
            )

    def status_reported(self, session: WorkerSession, status: WorkerStatus) -> None:
        before = self._counted.get(session.key) or WorkerStatus()
        self._counted[session.key] = status
        metrics, role = self._metrics, session.role
        transport = session.info.transport if session.info is not None else ""
        for counter, now, then in (
            (metrics.prompt_tokens_computed.labels(role), status.prompt_tokens_computed, before.prompt_tokens_computed),
            (metrics.prompt_tokens_cached.labels(role), status.prompt_tokens_cached, before.prompt_tokens_cached),
            (metrics.decode_tokens, status.decode_tokens, before.decode_tokens),
            (metrics.preemptions, status.preemptions, before.preemptions),
            (metrics.handoff_wait_s, status.handoff_wait_s, before.handoff_wait_s),
            (metrics.kv_transfer_bytes.labels(transport or "unknown"), status.transfer_bytes, before.transfer_bytes),
        ):
            if now > then:
                counter.inc(now - then)
        for reason, number in status.refused.items():
            if number > before.refused.get(reason, 0):
                metrics.handoffs_refused.labels(reason).inc(number - before.refused.get(reason, 0))

    def event_seen(self, kind: str, message: Any) -> None:
        """Measure what no request waits for: it may have ended before."""
        metrics = self._metrics
        if kind == "handoff_done":
            metrics.handoff_s.observe(message.handoff_s)
            metrics.exposed_s.observe(message.exposed_s)
            metrics.prefill_compute_s.observe(message.compute_s)
            self._recomputed(message)
        elif kind == "admitted":
            metrics.admission_s.observe(message.admission_s)
        elif kind == "ended":
            metrics.prefill_compute_s.observe(message.compute_s)
            self._recomputed(message)
        elif kind == "local":
            metrics.local_prefills.labels("mixed_pool" if message.attempt == 1 else "recovery").inc()
            self._recomputed(message)
        elif kind == "writer_suspected":
            self._writer_suspected(message)

    def _recomputed(self, message: Any) -> None:
        """Count what an attempt after the first computed of its prompt."""
        if message.attempt > 1:
            self._metrics.prompt_tokens_recomputed.inc(message.num_computed_tokens)

    def _writer_suspected(self, message: WriterSuspected) -> None:
        key = WorkerKey(message.writer_worker_id, message.writer_incarnation)
        _log.error("a decode worker suspects the silent writer %s, which must be killed on its node", key)
        self._metrics.writers_suspected.inc()
        member = self._members.get(key)  # none: it has ended, which the decode worker has yet to hear
        if member is not None and ROLE_FROM_PROTO[member.role] is Role.PREFILL:
            self._suspected.add(key)

    # -- for the supervisor

    @property
    def suspected(self) -> Set[WorkerKey]:
        """Members that decode workers have found silent beyond lease and grace."""
        return self._suspected

    # -- for people and tools

    def sessions(self) -> list[WorkerSession]:
        return list(self._sessions.values())

    def describe(self, model: str) -> dict[str, Any]:
        """The body of `GET /v1/cluster`."""
        pools: dict[str, list[dict[str, Any]]] = {role.value: [] for role in WORKER_ROLES}
        for key in sorted(self._members.keys() | self._sessions.keys()):
            session, member = self._sessions.get(key), self._members.get(key)
            if session is not None:
                member = session.member
            if member is not None:
                pools[ROLE_FROM_PROTO[member.role]].append(_described(member, session))
        open_sessions = [s for s in self._sessions.values() if s.state is SessionState.OPEN]
        prefill = [s for s in open_sessions if s.is_prefill]
        decode = [s for s in open_sessions if not s.is_prefill]
        return {
            "model": model,
            "membership_version": max(self._version, 0),
            **pools,
            "incompatible": _mismatches(prefill, decode),
        }


def _mismatches(prefill: Sequence[WorkerSession], decode: Sequence[WorkerSession]) -> list[dict[str, Any]]:
    """Every pair that may not serve a request together, with what differs."""
    return [
        {
            "prefill": str(p.key),
            "decode": str(d.key),
            "differences": mismatch(p.kv_format, str(p.key), d.kv_format, str(d.key)),
        }
        for p in prefill
        for d in decode
        if p.kv_format != d.kv_format
    ]


def _described(member: Member, session: WorkerSession | None) -> dict[str, Any]:
    status = session.status if session is not None else WorkerStatus()
    info = session.info if session is not None else None
    pages = status.pages
    return {
        "id": member.worker_id,
        "incarnation": member.incarnation,
        "pid": info.pid if info is not None else member.pid,
        "node": (info.node if info is not None else "") or member.node,
        "state": session.shown_state if session is not None else _shown_without_session(member),
        "address": member.address,
        "transport": info.transport if info is not None else "",
        "version": info.version if info is not None else "",
        "layout": asdict(session.kv_format.layout) if session is not None and info is not None else None,
        "num_running": status.num_running,
        "num_queued": status.num_queued,
        "num_queued_tokens": status.num_queued_tokens,
        "pages": {name: getattr(pages, name) for name in ("free", "used", "reserved", "cached", "quarantined")},
    }


def _shown_without_session(member: Member) -> str:
    return "starting" if member.state == "ready" else member.state


def _shown(member: Member) -> str:
    return f"{ROLE_FROM_PROTO[member.role]} {member.worker_id}/{member.incarnation} {member.state}"
