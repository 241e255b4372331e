"""From counts since the start of each router and worker to what happened since the last look. No clock."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

from tandem.cluster.supervisor.demand import Asked, Held, Sample, Worked, added
from tandem.core.identity import Role
from tandem.rpc.v1 import common_pb2, control_pb2

WARM_UP_S = 5.0
"""So long after a worker has become ready what it measures says nothing of what it can do."""

_Counts = TypeVar("_Counts", Asked, Worked)


@dataclass(frozen=True)
class WorkerReport:
    """The last status of a worker.

    Attributes:
        incarnation: of this life.
        ready_s: for how long it has been ready.
    """

    role: Role
    incarnation: str
    ready_s: float
    status: common_pb2.WorkerStatus


@dataclass(frozen=True)
class RouterReport:
    """The last of what a router told of its requests.

    Attributes:
        told_s: when.
    """

    incarnation: str
    told_s: float
    load: control_pb2.RequestLoad


class LoadFigures:
    """Args: page_size: tokens in a page."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        # As of the last look, by incarnation.
        self._asked: dict[str, Asked] = {}
        self._worked: dict[str, Worked] = {}

    def sample(self, workers: Iterable[WorkerReport], routers: Iterable[RouterReport]) -> Sample:
        """What happened since the last call. Who is heard for the first time counts from here on."""
        workers, routers = list(workers), list(routers)
        asked, before = {each.incarnation: _asked(each.load) for each in routers}, self._asked
        self._asked = asked
        total = Asked()
        for incarnation, counts in asked.items():
            total = added(total, _since(counts, before.get(incarnation)))
        return Sample(total, self._work(workers), self._held(workers, routers))

    def _work(self, workers: list[WorkerReport]) -> dict[Role, list[Worked]]:
        now, before = {each.incarnation: _worked(each.status) for each in workers}, self._worked
        self._worked = now
        found: dict[Role, list[Worked]] = {Role.PREFILL: [], Role.DECODE: []}
        for each in workers:
            if each.ready_s >= WARM_UP_S:
                found[each.role].append(_since(now[each.incarnation], before.get(each.incarnation)))
        return found

    def _held(self, workers: list[WorkerReport], routers: list[RouterReport]) -> Held:
        prefill = [each.status for each in workers if each.role is Role.PREFILL]
        decode = [each.status for each in workers if each.role is Role.DECODE]
        pages = [status.pages for status in decode]
        num_held = sum(each.used + each.reserved for each in pages)
        rooms = [each.free + each.cached + each.used + each.reserved for each in pages]
        num_requests = sum(status.num_running + status.num_incoming for status in decode)
        of_request = num_held / num_requests if num_requests else 0.0
        num_waiting = sum(status.num_queued for status in decode)
        num_waiting += sum(each.load.num_held_for_decode for each in routers)
        return Held(
            waiting_tokens=sum(each.load.waiting_tokens for each in routers)
            + sum(status.num_queued_tokens for status in prefill),
            kv_tokens=num_held * self._page_size,
            waiting_kv_tokens=num_waiting * of_request * self._page_size,
            kv_capacity=self._page_size * sum(rooms) / len(rooms) if rooms else 0.0,
            max_num_seqs=max((status.max_num_seqs for status in decode), default=0),
        )


def _since(now: _Counts, before: _Counts | None) -> _Counts:
    return added(now, before if before is not None else now, -1)


def _asked(load: control_pb2.RequestLoad) -> Asked:
    return Asked(
        num_requests=load.num_requests,
        prompt_tokens=load.prompt_tokens,
        num_ended=load.num_ended,
        ended_tokens=load.ended_tokens,
        output_tokens=load.output_tokens,
        num_first=load.num_first,
        num_first_late=load.num_first_late,
        num_timed=load.num_timed,
        num_timed_late=load.num_timed_late,
    )


def _worked(status: common_pb2.WorkerStatus) -> Worked:
    return Worked(
        num_steps=status.steps,
        busy_s=status.busy_s,
        prompt_tokens=status.prompt_tokens_computed,
        output_tokens=status.decode_tokens,
    )
