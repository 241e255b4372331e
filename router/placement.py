"""Which workers serve a request: pure functions over a snapshot.

Prefill is bound by compute, so the prompt tokens that wait say how long a new prompt waits. Decode is bound by
pages and by the size of its batch. A pair must have equal layouts, or the pages of one mean nothing to the other.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from router.worker_key import WorkerKey
from tandem.core.errors import IncompatibleError, NoWorkerError
from tandem.core.pages import pages_for


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """One ready worker as the router sees it now: its last report and what was sent to it since."""

    key: WorkerKey
    layout: bytes  # equal bytes, equal layouts
    page_size: int
    num_active: int  # requests that run or wait there
    num_queued_tokens: int  # prompt tokens not yet computed
    num_available_pages: int  # free or evictable, less what our unanswered reservations will take


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All workers that may get new requests."""

    prefill: Sequence[WorkerLoad]
    decode: Sequence[WorkerLoad]


@dataclass(frozen=True, slots=True)
class Placement:
    prefill: WorkerKey
    decode: WorkerKey


def place(snapshot: Snapshot, num_prompt_tokens: int, avoid: Collection[WorkerKey] = ()) -> Placement:
    """The least loaded pair for a prompt. Workers in `avoid` are taken only where there is no other.

    Raises:
        NoWorkerError: a pool is empty; names it.
        IncompatibleError: no prefill worker has the layout of a decode worker.
    """
    for pool, workers in (("prefill", snapshot.prefill), ("decode", snapshot.decode)):
        if not workers:
            raise NoWorkerError(f"no {pool} worker is ready; try again later")
    prefill_layouts = {worker.layout for worker in snapshot.prefill}
    decodes = [worker for worker in snapshot.decode if worker.layout in prefill_layouts]
    if not decodes:
        raise IncompatibleError(
            "no prefill worker and decode worker agree on layout (weights, dtype, page size); see GET /v1/cluster"
        )
    decode = min(decodes, key=lambda worker: (worker.key in avoid, *_decode_cost(worker, num_prompt_tokens)))
    prefills = [worker for worker in snapshot.prefill if worker.layout == decode.layout]
    prefill = min(prefills, key=lambda worker: (worker.key in avoid, *_prefill_cost(worker)))
    return Placement(prefill.key, decode.key)


def _prefill_cost(worker: WorkerLoad) -> tuple[int, int, WorkerKey]:
    """Prompt tokens in front, then requests; the name decides what is left, so that equal inputs place equally."""
    return worker.num_queued_tokens, worker.num_active, worker.key


def _decode_cost(worker: WorkerLoad, num_prompt_tokens: int) -> tuple[bool, int, int, WorkerKey]:
    """Room for the prompt first, then the smaller batch, then the more pages."""
    needed = pages_for(num_prompt_tokens, worker.page_size)
    lacks_room = needed > worker.num_available_pages
    return lacks_room, worker.num_active, -worker.num_available_pages, worker.key
