"""What the router notices about its workers beside the requests: where it cannot reach them, and what they suspect."""

from __future__ import annotations

import asyncio
import gc
import math
import socket
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from router.policy.admission import Admission
from router.policy.retry_budget import RetryBudget
from router.policy.snapshot import Link
from router.request.events import Event, WorkerLost
from router.request.mailbox import Mailbox
from router.workers.gauges import RouterGauges
from router.workers.registry import WorkerRegistry
from router.workers.session import SessionState, WorkerSession
from tandem.core.clock import VirtualClock
from tandem.core.identity import Role, WorkerKey
from tandem.core.metrics import RouterMetrics
from tandem.rpc.guard import RoleGuard
from tandem.rpc.permissions import PeerRole
from tandem.rpc.v1.common_pb2 import (
    ROLE_DECODE,
    ROLE_PREFILL,
    LinkReport,
    LinkStatus,
    WorkerInfo,
    WorkerStatus,
    WorkSpan,
)
from tandem.rpc.v1.control_pb2 import Member, Membership, RouterStatusRequest, SuspectedWriter
from tandem.rpc.v1.decode_pb2 import Admitted, PromptComputed, WriterSuspected
from tandem.rpc.v1.prefill_pb2 import HandoffDone, LinkChanged
from tests.support.router_site import Site
from tests.support.scripted_worker import ScriptedDecode, ScriptedPrefill
from tests.support.waiting import wait_until


def membership(version: int, address: str, state: str = "ready") -> Membership:
    member = Member(worker_id="prefill-0", incarnation="1", role=ROLE_PREFILL, address=address, state=state)
    return Membership(version=version, members=[member])


def suspicion(incarnation: str) -> WriterSuspected:
    return WriterSuspected(writer_worker_id="prefill-0", writer_incarnation=incarnation)


def test_a_writer_is_suspected_as_long_as_it_is_a_member() -> None:
    metrics = RouterMetrics()
    registry = WorkerRegistry(lease_s=1.0, metrics=metrics)
    registry.apply(membership(1, "", "starting"))
    registry.event_seen(suspicion("an earlier one, which has ended"))
    assert not registry.suspected
    for _ in range(2):  # decode says so again after each grace
        registry.event_seen(suspicion("1"))
    assert registry.suspected == {WorkerKey("prefill-0", "1")}
    assert b"tandem_writers_suspected_total 3.0" in metrics.exposition()
    registry.apply(membership(2, "", "failed"))
    assert registry.suspected
    registry.apply(Membership(version=3))
    assert not registry.suspected


def test_nobody_but_a_prefill_worker_writes() -> None:
    registry = WorkerRegistry(lease_s=1.0, metrics=RouterMetrics())
    members = membership(1, "", "starting")
    members.members[0].role = ROLE_DECODE
    registry.apply(members)
    registry.event_seen(suspicion("1"))
    assert not registry.suspected


def test_a_membership_says_how_many_routers_share_the_workers() -> None:
    registry = WorkerRegistry(lease_s=1.0, metrics=RouterMetrics())
    assert registry.num_routers == 1
    registry.apply(Membership(version=1, num_routers=3))
    assert registry.num_routers == 3
    registry.apply(Membership(version=2))  # of a supervisor that does not say
    assert registry.num_routers == 1


def test_members_of_a_role_that_it_does_not_know_are_none_of_its_workers() -> None:
    """A later version of the supervisor may have such."""
    members = membership(1, "127.0.0.1:1")
    members.members[0].role = 7  # type: ignore[assignment]
    members.num_routers = 2
    registry = WorkerRegistry(lease_s=1.0, metrics=RouterMetrics())
    registry.apply(members)
    assert registry.num_routers == 2, "the rest of it holds"
    assert registry.sessions() == []
    assert not registry.snapshot().is_decode_coming


def test_every_status_names_the_suspected_writers(site: Site) -> None:
    def suspected() -> list[SuspectedWriter]:
        return list(site.pool.control.RouterStatus(RouterStatusRequest(), timeout=15).suspected_writers)

    assert suspected() == []
    site.decode.emit(writer_suspected=suspicion("1"))
    wait_until(suspected, "a suspicion")
    assert suspected() == [SuspectedWriter(worker_id="prefill-0", incarnation="1")]
    site.pool.remove(site.prefill)
    assert suspected() == []
    site.prefill.kill()


def test_workers_of_both_pools_are_introduced_to_each_other_whoever_comes_first(site: Site) -> None:
    wait_until(lambda: site.prefill.met == ["decode-0"], "the introduction")
    later = ScriptedDecode("decode-1")
    site.pool.add(later)
    wait_until(lambda: site.prefill.met == ["decode-0", "decode-1"], "that of one who comes later")
    late_prefill = ScriptedPrefill("prefill-1")
    site.pool.add(late_prefill)
    wait_until(lambda: sorted(late_prefill.met) == ["decode-0", "decode-1"], "those of the others")


def test_a_broken_link_is_known_until_prefill_says_that_it_is_up() -> None:
    registry = WorkerRegistry(lease_s=1.0, metrics=RouterMetrics())
    names = {"prefill_worker_id": "prefill-0", "prefill_incarnation": "1"}
    names |= {"decode_worker_id": "decode-0", "decode_incarnation": "2"}
    pair = WorkerKey("prefill-0", "1"), WorkerKey("decode-0", "2")
    registry.event_seen(LinkChanged(**names, is_broken=True))
    assert registry.snapshot().links[pair].is_broken
    registry.event_seen(LinkChanged(**names, is_broken=False))
    assert not registry.snapshot().links[pair].is_broken


def test_the_ends_of_certificates_are_exported_of_those_that_show_one(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics, clock = RouterMetrics(), VirtualClock()
    registry = WorkerRegistry(lease_s=1.0, metrics=metrics)
    told = Membership(version=1, certificate_expires=2_000_000_000)
    registry.apply(told)
    open_ones = [
        SimpleNamespace(
            state=SessionState.OPEN,
            key=WorkerKey(f"decode-{number}", "1"),
            role="decode",
            status=WorkerStatus(certificate_expires=expires),
            info=WorkerInfo(),
        )
        for number, expires in enumerate((2_000_000_001, 0))
    ]
    monkeypatch.setattr(registry, "sessions", lambda: open_ones)
    gauges = RouterGauges(registry, Admission(1, clock), RetryBudget(0.0, 1, clock), RoleGuard(), "router-0")
    (family,) = [each for each in gauges.collect() if each.name.startswith("tandem_certificate")]
    assert {(sample.labels["process"], sample.labels["role"], sample.value) for sample in family.samples} == {
        ("supervisor", "supervisor", 2_000_000_000),
        ("decode-0", "decode", 2_000_000_001),
    }


def test_what_a_handoff_took_is_measured() -> None:
    metrics = RouterMetrics()
    registry = WorkerRegistry(lease_s=1.0, metrics=metrics)
    registry.event_seen(HandoffDone(handoff_s=0.5, exposed_s=0.25, compute_s=2.0))
    registry.event_seen(Admitted(admission_s=0.125))
    sums = {"handoff": 0.5, "exposed_transfer": 0.25, "prefill_compute": 2.0, "admission": 0.125}
    for name, seconds in sums.items():
        assert f"tandem_{name}_seconds_sum {seconds}\n".encode() in metrics.exposition()


def test_chunks_that_decode_computed_are_its_work_in_a_waterfall() -> None:
    registry, heard = WorkerRegistry(lease_s=1.0, metrics=RouterMetrics()), list[tuple[object, ...]]()
    registry.on_work = lambda *work: heard.append(work)
    chunk = WorkSpan(name="chunk", begin_s=0.5, end_s=0.25, count=7)
    registry.event_seen(PromptComputed(request_id="r", attempt=2, spans=[chunk]))
    assert [(*work[:3], list(work[3])) for work in heard] == [("r", 2, Role.DECODE, [chunk])]  # type: ignore[call-overload]


def test_what_prefill_workers_say_of_their_links_is_in_the_snapshot_and_the_metrics() -> None:
    metrics, clock = RouterMetrics(), VirtualClock()
    registry = WorkerRegistry(lease_s=1.0, metrics=metrics)
    metrics.registry.register(
        RouterGauges(registry, Admission(1, clock), RetryBudget(0.0, 1, clock), RoleGuard(), "router-0")
    )
    prefill = WorkerKey("prefill-0", "1")
    sessions = [
        WorkerSession(member, lease_s=1.0, observer=registry)
        for member in (membership(1, "").members[0], Member(worker_id="prefill-1", incarnation="1", role=ROLE_PREFILL))
    ]

    def say(number: int, *links: LinkStatus) -> None:
        registry.status_reported(sessions[number], WorkerStatus(links=LinkReport(links=links)))

    slow = LinkStatus(worker_id="decode-0", incarnation="1", bytes_per_s=2e6)
    broken = LinkStatus(worker_id="decode-1", incarnation="1", is_broken=True)
    say(0, slow, broken)
    say(1, slow)
    registry.status_reported(sessions[0], WorkerStatus(num_running=1))  # says nothing of links: nothing has changed
    decodes = [WorkerKey("decode-0", "1"), WorkerKey("decode-1", "1")]
    assert registry.snapshot().links == {
        (prefill, decodes[0]): Link(2e6),
        (prefill, decodes[1]): Link(math.inf, is_broken=True),
        (WorkerKey("prefill-1", "1"), decodes[0]): Link(2e6),
    }
    assert b'tandem_link_bytes_per_second{decode="decode-0",prefill="prefill-0"} 2e+06' in metrics.exposition()
    assert b'tandem_link_bytes_per_second{decode="decode-1",prefill="prefill-0"} 0.0' in metrics.exposition()
    say(0, slow)
    assert (prefill, decodes[1]) not in registry.snapshot().links


@pytest.mark.long
async def test_a_worker_that_is_not_reached_is_told_of_once_for_each_reason(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.workers.session._MAX_BACKOFF_S", 0.05)
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # bound and not listening: refused
        registry = WorkerRegistry(lease_s=5.0, metrics=RouterMetrics())
        registry.apply(membership(1, f"127.0.0.1:{closed.getsockname()[1]}"))
        (session,) = registry.sessions()
        await tries(session, 5)
        assert caplog.text.count("worker prefill-0/1 not reached") == 1
        caplog.clear()
        other = await asyncio.to_thread(ScriptedPrefill, "prefill-9")
        try:
            session.member = membership(2, other.info.address).members[0]
            await tries(session, 5)
            told = [line for line in caplog.messages if "worker prefill-0/1 not reached" in line]
            assert len(told) == 1
            assert "answers as prefill-9/1" in told[0]
        finally:
            await registry.close()
            await asyncio.to_thread(other.kill)


async def tries(session: Any, num: int) -> None:
    """Wait for so many ends of its attempts to connect."""
    ended, tell = asyncio.Semaphore(0), session._tell_lost

    def count(error: Exception) -> None:
        ended.release()
        tell(error)

    session._tell_lost = count
    async with asyncio.timeout(15):
        for _ in range(num):
            await ended.acquire()
    session._tell_lost = tell


@pytest.mark.long
@pytest.mark.parametrize("end", [ScriptedPrefill.go_silent, ScriptedPrefill.kill], ids=["silent", "killed"])
async def test_a_lost_workers_call_is_gone_at_once_without_the_garbage_collector(
    end: Callable[[ScriptedPrefill], None],
) -> None:
    """gRPC keeps a connection open as long as its call lives."""
    worker = await asyncio.to_thread(ScriptedPrefill, "prefill-0")
    registry = WorkerRegistry(lease_s=0.3, metrics=RouterMetrics())
    gc.collect()
    before = num_calls()
    gc.disable()
    try:
        changed = asyncio.Event()
        registry.on_change = changed.set
        registry.apply(membership(1, worker.info.address))
        (session,) = registry.sessions()
        mailbox: Mailbox[Event] = Mailbox()
        session.hold("r", mailbox, 10, computes=True)
        async with asyncio.timeout(15):
            while not session.info.worker_id:
                await changed.wait()
                changed.clear()
        await asyncio.to_thread(end, worker)
        async with asyncio.timeout(15):
            while not any(isinstance(event, WorkerLost) for event in await mailbox.take()):
                pass
        session.close("enough")
        await session.wait_closed()
        assert num_calls() == before
    finally:
        gc.enable()
        await registry.close()
        await asyncio.to_thread(worker.kill)


def num_calls() -> int:
    return sum(type(thing).__name__ == "StreamStreamCall" for thing in gc.get_objects())


def test_calls_that_the_control_service_refused_are_counted() -> None:
    guard, metrics, clock = RoleGuard(), RouterMetrics(), VirtualClock()
    registry = WorkerRegistry(lease_s=1.0, metrics=metrics)
    gauges = RouterGauges(registry, Admission(1, clock), RetryBudget(0.0, 1, clock), guard, "router-0")
    metrics.registry.register(gauges)
    guard.num_denied["/tandem.v1.RouterControl/DrainRouter", PeerRole.PREFILL] += 2
    guard.num_denied["/tandem.v1.RouterControl/DrainRouter", None] += 1
    shown = metrics.exposition().decode()
    for role, num in (("prefill", 2), ("none", 1)):
        sample = f'tandem_calls_denied_total{{method="/tandem.v1.RouterControl/DrainRouter",role="{role}"}} {num}.0'
        assert sample in shown


def test_a_router_shows_whom_it_refused(site: Site) -> None:
    assert "# TYPE tandem_calls_denied_total counter" in httpx.get(f"{site.url}/metrics").text


def test_admission_hears_of_workers_that_come_and_go() -> None:
    registry = WorkerRegistry(lease_s=1.0, metrics=RouterMetrics())
    changes: list[int] = []
    registry.on_change = lambda: changes.append(1)
    registry.apply(membership(1, "", "starting"))
    registry.apply(Membership(version=2))
    assert len(changes) == 2
