"""Decides which workers serve a request and which one computes its prompt: one pure decision over a snapshot.

Prefill is bound by compute, so the waiting prompt tokens tell how long a new prompt waits there. Decode is bound by
pages and by the size of its batch. Both workers of a pair must have the same KV format.

**The mixed pool.** A decode step mostly reads the weights, so some prompt tokens in it cost little more. A decode
worker can compute a whole prompt in chunks that fill its steps up to `mixed_step_tokens`
(`tandem/worker/scheduler.py`), though slower than a prefill worker. A new prompt goes there where it is ready sooner.
Reference: the mixed pool of Patel et al., "Splitwise", ISCA 2024; here the workers keep their roles.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from kvtransfer.layout import KvFormat, mismatch
from router.policy.snapshot import Snapshot, WorkerLoad
from tandem.core.errors import IncompatibleError, NoWorkerError
from tandem.core.identity import Role, WorkerKey
from tandem.core.pages import pages_for

# What a prompt token costs in a decode step, relative to one in a prefill worker's chunk. With a lower factor decode
# would take prompts from a prefill worker that will have time for them soon.
_SMALL_STEP_COST = 1.2


@dataclass(frozen=True, slots=True)
class RequestFacts:
    """What a routing decision knows of a request.

    Attributes:
        priority: urgent where below 0.
        page_keys: of the prompt's full pages, in order; empty where unknown.
        deadline_s: when its client gives up, on the router's clock; `None` where it does not.
        mixed_pool_tokens: the longest prompt of the mixed pool; longer ones would slow the other sequences for long.
    """

    num_prompt_tokens: int
    priority: int = 0
    page_keys: Sequence[bytes] = ()
    deadline_s: float | None = None
    mixed_pool_tokens: int = 0
    is_first_attempt: bool = True


@dataclass(frozen=True, slots=True)
class Wishes:
    """Which workers recovery wants for the next attempt.

    Attributes:
        prefill: holds pages of the request; it is chosen where it is ready and has a partner.
        decode: as `prefill`.
        max_local_tokens: if above 0, `decode` alone is asked first and may compute so many tokens by itself. A prefill
            worker is chosen when decode says that it needs one.
        avoid: chosen only where there is no other.
        exclude: never chosen, because they are gone or leaving.
    """

    prefill: WorkerKey | None = None
    decode: WorkerKey | None = None
    max_local_tokens: int = 0
    avoid: frozenset[WorkerKey] = frozenset()
    exclude: frozenset[WorkerKey] = frozenset()


class Why(StrEnum):
    LOAD = "load"  # the pair that has least to do
    KEPT = "kept"  # it holds pages of the request
    MIXED_POOL = "mixed_pool"  # a decode worker computes the prompt sooner


@dataclass(frozen=True, slots=True)
class Route:
    """`prefill` is `None` where decode is asked first; it may compute up to `max_local_tokens` by itself."""

    prefill: WorkerKey | None
    decode: WorkerKey
    max_local_tokens: int
    why: Why


ANY = Wishes()
_ANYTHING = RequestFacts(num_prompt_tokens=0)


def choose(snapshot: Snapshot, facts: RequestFacts, wishes: Wishes = ANY) -> Route:
    """The least loaded workers for a request, as far as `wishes` allow.

    Raises:
        NoWorkerError: a pool is empty; names it.
        IncompatibleError: no prefill worker has the format of a decode worker; names who and what differs.
    """
    if wishes.max_local_tokens and any(worker.key == wishes.decode for worker in snapshot.decode):
        assert wishes.decode is not None
        return Route(None, wishes.decode, wishes.max_local_tokens, Why.KEPT)
    if (alone := _computes_alone(snapshot, facts)) is not None:
        return Route(None, alone, facts.num_prompt_tokens, Why.MIXED_POOL)
    prefills = _taken(Role.PREFILL, snapshot.prefill, wishes)
    decodes = _taken(Role.DECODE, snapshot.decode, wishes)
    formats = {worker.kv_format for worker in prefills}
    pairable = [worker for worker in decodes if worker.kv_format in formats]
    if not pairable:
        raise _incompatible(prefills[0], decodes[0].key, decodes[0].kv_format)
    wished_format = next((worker.kv_format for worker in prefills if worker.key == wishes.prefill), None)

    def decode_rank(worker: WorkerLoad) -> tuple[object, ...]:
        is_off = wished_format is not None and worker.kv_format != wished_format
        own = (worker.key in wishes.avoid, worker.key != wishes.decode, is_off)
        return (*own, *_decode_cost(worker, facts))

    decode = min(pairable, key=decode_rank)
    prefill = _best_prefill(prefills, decode.kv_format, wishes)
    is_kept = decode.key == wishes.decode or prefill.key == wishes.prefill
    return Route(prefill.key, decode.key, 0, Why.KEPT if is_kept else Why.LOAD)


def choose_prefill(snapshot: Snapshot, decode: WorkerKey, kv_format: KvFormat, wishes: Wishes = ANY) -> WorkerKey:
    """The least loaded prefill worker for a decode worker that has granted pages. Raises as `choose` does."""
    prefills = _taken(Role.PREFILL, snapshot.prefill, wishes)
    if all(worker.kv_format != kv_format for worker in prefills):
        raise _incompatible(prefills[0], decode, kv_format)
    return _best_prefill(prefills, kv_format, wishes).key


def check_ready(snapshot: Snapshot) -> None:
    """Raises as `choose` does unless a request could be placed: both pools have a ready worker, and two pair."""
    choose(snapshot, _ANYTHING)


def check_placeable(snapshot: Snapshot) -> None:
    """Raises as `choose` does unless a request can be placed now, or when a worker that is coming is there."""
    if not snapshot.may_get_better:
        check_ready(snapshot)


# --- who may ------------------------------------------------------------------------------------------------------


def _computes_alone(snapshot: Snapshot, facts: RequestFacts) -> WorkerKey | None:
    """The decode worker that would have a new prompt computed before any prefill worker; `None`: hand it off.

    Only workers with a KV format that both pools have count, because only they could take part in a handoff.
    """
    may_be_slow = facts.is_first_attempt and facts.priority >= 0
    if not may_be_slow or not 0 < facts.num_prompt_tokens <= facts.mixed_pool_tokens:
        return None
    formats = {worker.kv_format for worker in snapshot.prefill} & {worker.kv_format for worker in snapshot.decode}
    queues = [worker.num_queued_tokens for worker in snapshot.prefill if worker.kv_format in formats]
    costs = {worker.key: _local_cost(worker, facts) for worker in snapshot.decode if worker.kv_format in formats}
    if not costs:
        return None
    best = min(costs, key=lambda key: (costs[key], key))
    return best if costs[best] < min(queues) + facts.num_prompt_tokens else None


def _taken(role: Role, workers: Sequence[WorkerLoad], wishes: Wishes) -> list[WorkerLoad]:
    taken = [worker for worker in workers if worker.key not in wishes.exclude]
    if not taken:
        raise NoWorkerError(f"no {role} worker is ready; try again later")
    return taken


def _best_prefill(workers: Sequence[WorkerLoad], kv_format: KvFormat, wishes: Wishes) -> WorkerLoad:
    return min(
        (worker for worker in workers if worker.kv_format == kv_format),
        key=lambda worker: (worker.key in wishes.avoid, worker.key != wishes.prefill, *_prefill_cost(worker)),
    )


def _incompatible(prefill: WorkerLoad, decode: WorkerKey, kv_format: KvFormat) -> IncompatibleError:
    """Names one pair, which is enough to act on; `GET /v1/cluster` has all of them."""
    differing = mismatch(prefill.kv_format, str(prefill.key), kv_format, str(decode))
    return IncompatibleError(
        f"no prefill worker can pair with a decode worker: {'; '.join(differing)} (see GET /v1/cluster)"
    )


# --- what it costs ------------------------------------------------------------------------------------------------


def _prefill_cost(worker: WorkerLoad) -> tuple[int, int, WorkerKey]:
    """Fewer prompt tokens in front first, then fewer requests, then the name: equal inputs give equal routes."""
    return worker.num_queued_tokens, worker.num_active, worker.key


def _decode_cost(worker: WorkerLoad, facts: RequestFacts) -> tuple[bool, int, int, WorkerKey]:
    """Room for the prompt first, then a smaller batch, then more free pages."""
    return not _has_room(worker, facts), worker.num_active, -worker.num_available_pages, worker.key


def _local_cost(worker: WorkerLoad, facts: RequestFacts) -> float:
    """Time until a decode worker has computed the prompt, in tokens of a prefill worker."""
    room = worker.mixed_step_tokens - worker.num_stepping
    if room < 1 or not _has_room(worker, facts):
        return float("inf")
    slowness = _SMALL_STEP_COST * worker.mixed_step_tokens / room
    return slowness * (worker.num_queued_tokens + facts.num_prompt_tokens)


def _has_room(worker: WorkerLoad, facts: RequestFacts) -> bool:
    return pages_for(facts.num_prompt_tokens, worker.page_size) <= worker.num_available_pages
