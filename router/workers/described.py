"""What people and tools are told of workers, and of those that do not fit together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from kvtransfer.layout import KvFormat, mismatch
from kvtransfer.wire import protocols_of
from router.workers.session import WorkerSession
from tandem.core.pages import PageState
from tandem.rpc.v1.common_pb2 import WorkerInfo, WorkerStatus
from tandem.rpc.v1.control_pb2 import Member


def mismatches(prefill: Sequence[WorkerSession], decode: Sequence[WorkerSession]) -> list[dict[str, Any]]:
    """Every pair that may not serve a request together, with what differs."""
    by_format: defaultdict[KvFormat, list[WorkerSession]] = defaultdict(list)
    for session in decode:
        by_format[session.kv_format].append(session)
    return [
        {
            "prefill": str(p.key),
            "decode": str(d.key),
            "differences": mismatch(p.kv_format, str(p.key), d.kv_format, str(d.key)),
        }
        for p in prefill
        for kv_format, those in by_format.items()
        if p.kv_format != kv_format
        for d in those
    ]


def outlined(member: Member, session: WorkerSession | None) -> dict[str, Any]:
    """A worker on the live page: what changes from second to second."""
    status = session.status if session is not None else WorkerStatus()
    return {
        "id": member.worker_id,
        "state": _state(member, session),
        "num_running": status.num_running,
        "num_queued": status.num_queued,
        "pages": {state.value: getattr(status.pages, state.value) for state in PageState},
    }


def _state(member: Member, session: WorkerSession | None) -> str:
    if session is not None:
        return session.shown_state
    return "starting" if member.state == "ready" else member.state  # a ready one without a session is to be met


def described(member: Member, session: WorkerSession | None) -> dict[str, Any]:
    """A worker in `GET /v1/cluster`."""
    info = session.info if session is not None else WorkerInfo()
    status = session.status if session is not None else WorkerStatus()
    return {
        "id": member.worker_id,
        "incarnation": member.incarnation,
        "pid": info.pid or member.pid,
        "node": info.node or member.node,
        "state": _state(member, session),
        "address": member.address,
        "transport": info.transport,
        "page_network": status.page_network,
        "version": info.version,
        "protocols": str(protocols_of(info)) if info.worker_id else "",
        "unreached": session.why_unreached if session is not None else "",
        "layout": asdict(session.kv_format.layout) if session is not None and info.worker_id else None,
        "num_running": status.num_running,
        "num_queued": status.num_queued,
        "num_queued_tokens": status.num_queued_tokens,
        "pages": {state.value: getattr(status.pages, state.value) for state in PageState},
    }
