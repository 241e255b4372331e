"""Between the supervisor's state and `tandem.v1`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tandem.cluster.supervisor.autoscale import Decision, Followed
from tandem.cluster.supervisor.events import Build, Ending, PublishMembership
from tandem.cluster.supervisor.events import Member as MemberState
from tandem.cluster.supervisor.pools import PoolState
from tandem.cluster.supervisor.slots import Phase, Slot
from tandem.core.identity import WORKER_ROLES, Role
from tandem.core.version import version
from tandem.rpc import security
from tandem.rpc.convert import ROLE_FROM_PROTO, ROLE_TO_PROTO
from tandem.rpc.v1 import common_pb2, control_pb2, supervisor_pb2


def membership(instruction: PublishMembership, cache_secret: bytes) -> control_pb2.Membership:
    return control_pb2.Membership(
        version=instruction.version,
        members=[_member(member) for member in instruction.members],
        num_routers=instruction.num_routers,
        router_number=instruction.router_number,
        ended=instruction.ended,
        cache_secret=cache_secret,
        colocated=instruction.colocated,
        certificate_expires=security.current().certificate_expires,
        pools=[
            control_pb2.PoolSize(
                role=ROLE_TO_PROTO[pool.role],
                wanted=pool.wanted,
                least=pool.least,
                most=pool.most,
                num_grown=pool.num_grown,
                num_shrunk=pool.num_shrunk,
                num_refused=pool.num_refused,
                num_taken=pool.num_taken,
            )
            for pool in instruction.pools
        ],
        other_routers=[
            control_pb2.OtherRouter(name=other.name, control_address=other.address, shares_port=other.shares_port)
            for other in instruction.others
        ],
    )


@dataclass(frozen=True)
class RouterReport:
    """What a router has told of its requests, as of its last heartbeat."""

    num_under_way: int = 0
    errors: common_pb2.RequestErrors | None = None
    certificate_expires: int = 0


def fill_cluster(
    message: supervisor_pb2.Cluster,
    cluster: PoolState,
    loads: Mapping[str, common_pb2.WorkerStatus],
    told: Mapping[str, RouterReport],
    now: float,
) -> None:
    """Lay the state over `message`, which holds what does not change (version, model, log directory …).

    Args:
        loads: the last report of each worker that lives, by name.
        told: the same of the routers.
    """
    message.membership_version = cluster.version
    message.settled, message.stopping = cluster.settled, cluster.closing
    for role in WORKER_ROLES:
        ready = sum(slot.role is role and slot.phase is Phase.READY for slot in cluster.workers.values())
        message.pools.append(supervisor_pb2.Pool(role=ROLE_TO_PROTO[role], wanted=cluster.wanted[role], ready=ready))
        if (bounds := cluster.sizes.ranges.get(role)) is not None:
            message.pools[-1].least, message.pools[-1].most = bounds.least, bounds.most
    for slot in sorted(cluster.workers.values(), key=lambda slot: (slot.role != Role.PREFILL, slot.index)):
        message.workers.append(_worker(slot, loads.get(slot.name), now))
    for slot in sorted(cluster.routers.values(), key=lambda slot: slot.index):
        report = told.get(slot.name, RouterReport())
        message.routers.append(_router(slot, report, now, closing=cluster.closing))
    message.wanted_routers = cluster.wanted[Role.ROUTER]
    message.build.CopyFrom(_build(cluster.upgrade.wanted))
    message.build_note = cluster.upgrade.note
    if message.routers:
        message.router.CopyFrom(message.routers[0])


def fill_decisions(message: supervisor_pb2.Cluster, followed: Mapping[Role, Followed], now: float) -> None:
    """Lay over a message that `fill_cluster` has filled why pools that follow their load have their sizes."""
    for pool in message.pools:
        if (told := followed.get(ROLE_FROM_PROTO[pool.role])) is None or told.latest is None:
            continue
        pool.latest.CopyFrom(_decision(told.latest, now))
        pool.changes.extend(_decision(decision, now) for decision in told.changes)


def _decision(decision: Decision, now: float) -> supervisor_pb2.Decision:
    return supervisor_pb2.Decision(
        age_s=now - decision.at_s,
        before=decision.before,
        wanted=decision.wanted,
        why=decision.why,
        refused=decision.refused,
        inputs=decision.inputs,
    )


def _router(slot: Slot, report: RouterReport, now: float, *, closing: bool) -> supervisor_pb2.ClusterRouter:
    node, pid = (slot.placement.node, slot.placement.pid) if slot.placement else ("", 0)
    return supervisor_pb2.ClusterRouter(
        name=slot.name,
        node=node,
        pid=pid,
        leaving=slot.leaving,
        retry_in_s=_retry_in_s(slot, now),
        num_under_way=report.num_under_way,
        errors=report.errors,
        certificate_expires=report.certificate_expires,
        state="draining" if closing and slot.phase is Phase.READY else slot.phase.value,
        url=slot.url,
        control_address=slot.address,
        incarnation=slot.incarnation,
        detail=_router_detail(slot),
        last_error=_error(slot.last_error),
        failures=slot.failures,
        build=_build(slot.build),
    )


def _router_detail(slot: Slot) -> str:
    """What it waits for, or why its last life ended."""
    if slot.note and slot.listens:
        return slot.note
    if slot.phase is Phase.READY and slot.successor:
        return f"drains when {slot.successor} is ready"
    return slot.last_error.message if slot.last_error else ""


def _worker(slot: Slot, load: common_pb2.WorkerStatus | None, now: float) -> supervisor_pb2.ClusterWorker:
    return supervisor_pb2.ClusterWorker(
        member=_member(slot.member),
        detail=_detail(slot),
        failures=slot.failures,
        retry_in_s=_retry_in_s(slot, now),
        load=load,
        last_error=_error(slot.last_error),
        leaving=slot.leaving,
        build=_build(slot.build),
        awaits=slot.awaits,
    )


def _build(build: Build) -> supervisor_pb2.Build:
    return supervisor_pb2.Build(digest=build.digest, version=build.version or version())


def _retry_in_s(slot: Slot, now: float) -> float:
    return max(0.0, slot.retry_at - now) if slot.retry_at is not None else 0.0


def _detail(slot: Slot) -> str:
    """What it waits for, or why it last ended."""
    if slot.note and slot.listens:
        return slot.note
    if slot.phase is Phase.READY and slot.successor:
        return f"drains when {slot.successor} is ready"
    if slot.awaits:
        return f"goes on in the process of {slot.awaits} once that has drained"
    if slot.phase is Phase.STARTING:
        return "loads the model" if slot.placement else f"waits for a node with a free `{slot.role}` in Ray"
    if slot.phase is Phase.DRAINING:
        return "finishes what it holds"
    if slot.phase is Phase.STOPPING:
        return "stops"
    if slot.phase is Phase.WAITING and slot.last_error:
        return slot.last_error.message
    return ""


def _member(member: MemberState) -> control_pb2.Member:
    return control_pb2.Member(
        worker_id=member.worker_id,
        incarnation=member.incarnation,
        role=ROLE_TO_PROTO[member.role],
        address=member.address,
        state=member.state,
        node=member.node,
        pid=member.pid,
    )


def _error(ending: Ending | None) -> common_pb2.Error | None:
    return common_pb2.Error(code=ending.code, message=ending.message) if ending else None
