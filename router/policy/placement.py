"""Which workers serve a request: pure functions over a snapshot.

Prefill is bound by compute, so the prompt tokens that wait say how long a new prompt waits. Decode is bound by
pages and by the size of its batch. A pair must have equal formats, or the pages of one mean nothing to the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvtransfer.layout import KvFormat, mismatch
from tandem.core.errors import IncompatibleError, NoWorkerError
from tandem.core.identity import WorkerKey
from tandem.core.pages import pages_for


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """One ready worker as the router sees it now: its last report and what was sent to it since."""

    key: WorkerKey
    kv_format: KvFormat
    page_size: int
    num_active: int  # requests that run or wait there
    num_queued_tokens: int  # prompt tokens not yet computed
    num_available_pages: int  # free or evictable, less what our unanswered reservations will take
    # Of a decode worker: requests that take part in its steps now, and the tokens of a step up to which it computes
    # prompts; 0: it should not.
    num_stepping: int = 0
    mixed_step_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All workers that may get new requests, and the pools that more will join."""

    prefill: Sequence[WorkerLoad]
    decode: Sequence[WorkerLoad]
    # Whether the membership has a worker of the pool that is not ready: it starts, or is to be replaced.
    is_prefill_coming: bool = False
    is_decode_coming: bool = False

    @property
    def may_get_better(self) -> bool:
        """Where nothing can be placed now: whether waiting makes sense, by the membership alone."""
        if self.prefill and self.decode:  # but no two of them pair
            return self.is_prefill_coming or self.is_decode_coming
        return bool((self.prefill or self.is_prefill_coming) and (self.decode or self.is_decode_coming))


@dataclass(frozen=True, slots=True)
class Wishes:
    """What an attempt wants of its workers.

    Attributes:
        prefill: holds pages of the request; taken where it is ready and may pair.
        decode: as `prefill`.
        alone: decode is asked first; prefill is chosen when decode says that it needs one.
        avoid: taken only where there is no other.
        exclude: never taken: known to be gone or leaving.
    """

    prefill: WorkerKey | None = None
    decode: WorkerKey | None = None
    alone: bool = False
    avoid: frozenset[WorkerKey] = frozenset()
    exclude: frozenset[WorkerKey] = frozenset()


@dataclass(frozen=True, slots=True)
class Placement:
    """`prefill` is `None` where decode is asked first."""

    prefill: WorkerKey | None
    decode: WorkerKey


ANY = Wishes()


def place(snapshot: Snapshot, num_prompt_tokens: int, wishes: Wishes = ANY) -> Placement:
    """The least loaded pair for a prompt, as far as `wishes` allow.

    Raises:
        NoWorkerError: a pool is empty; names it.
        IncompatibleError: no prefill worker has the format of a decode worker; names who and what differs.
    """
    if wishes.alone and any(worker.key == wishes.decode for worker in snapshot.decode):
        assert wishes.decode is not None
        return Placement(None, wishes.decode)
    prefills = _taken("prefill", snapshot.prefill, wishes)
    decodes = _taken("decode", snapshot.decode, wishes)
    formats = {worker.kv_format for worker in prefills}
    pairable = [worker for worker in decodes if worker.kv_format in formats]
    if not pairable:
        raise _incompatible(prefills[0], decodes[0].key, decodes[0].kv_format)
    wished_format = next((worker.kv_format for worker in prefills if worker.key == wishes.prefill), None)

    def decode_rank(worker: WorkerLoad) -> tuple[object, ...]:
        is_off = wished_format is not None and worker.kv_format != wished_format
        own = (worker.key in wishes.avoid, worker.key != wishes.decode, is_off)
        return (*own, *_decode_cost(worker, num_prompt_tokens))

    decode = min(pairable, key=decode_rank)
    return Placement(_best_prefill(prefills, decode.kv_format, wishes).key, decode.key)


def place_prefill(snapshot: Snapshot, decode: WorkerKey, kv_format: KvFormat, wishes: Wishes = ANY) -> Placement:
    """The least loaded prefill worker for a decode worker that has granted pages. Raises as `place` does."""
    prefills = _taken("prefill", snapshot.prefill, wishes)
    if all(worker.kv_format != kv_format for worker in prefills):
        raise _incompatible(prefills[0], decode, kv_format)
    return Placement(_best_prefill(prefills, kv_format, wishes).key, decode)


def _taken(pool: str, workers: Sequence[WorkerLoad], wishes: Wishes) -> list[WorkerLoad]:
    taken = [worker for worker in workers if worker.key not in wishes.exclude]
    if not taken:
        raise NoWorkerError(f"no {pool} worker is ready; try again later")
    return taken


def _best_prefill(workers: Sequence[WorkerLoad], kv_format: KvFormat, wishes: Wishes) -> WorkerLoad:
    return min(
        (worker for worker in workers if worker.kv_format == kv_format),
        key=lambda worker: (worker.key in wishes.avoid, worker.key != wishes.prefill, *_prefill_cost(worker)),
    )


def _prefill_cost(worker: WorkerLoad) -> tuple[int, int, WorkerKey]:
    """Prompt tokens in front, then requests; the name decides what is left, so that equal inputs place equally."""
    return worker.num_queued_tokens, worker.num_active, worker.key


def _decode_cost(worker: WorkerLoad, num_prompt_tokens: int) -> tuple[bool, int, int, WorkerKey]:
    """Room for the prompt first, then the smaller batch, then the more pages."""
    needed = pages_for(num_prompt_tokens, worker.page_size)
    lacks_room = needed > worker.num_available_pages
    return lacks_room, worker.num_active, -worker.num_available_pages, worker.key


def _incompatible(prefill: WorkerLoad, decode: WorkerKey, kv_format: KvFormat) -> IncompatibleError:
    """One pair is enough to act on; `GET /v1/cluster` has all of them."""
    differing = mismatch(prefill.kv_format, str(prefill.key), kv_format, str(decode))
    return IncompatibleError(
        f"no prefill worker can pair with a decode worker: {'; '.join(differing)} (see GET /v1/cluster)"
    )
