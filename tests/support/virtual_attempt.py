"""One attempt at a request of the router in virtual time, as `router.lifecycle.attempt` has it."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from decode_worker.events import Admitted, ComputesHere, GrantMade
from kvtransfer.protocol.messages import AttemptKey
from prefill_worker.events import HandedOff, PromptEnded, PromptStarted
from router.policy.choose import choose_prefill
from router.policy.recovery import AttemptEnd, Fault, failure
from router.policy.route import Route
from tandem.core.errors import IncompatibleError, InternalError, NoWorkerError, TandemError, WorkerLostError
from tandem.worker.request import AttemptFailed, TokenSampled
from tests.support.decode_node import DecodeNode
from tests.support.node import FORMAT, Node
from tests.support.prefill_node import PrefillNode

if TYPE_CHECKING:
    from tests.support.virtual_router import InFlight, Router

_VERDICT_S = 0.5  # as `router.lifecycle.attempt`


class Attempt:
    """As `router.lifecycle.attempt.Attempt`; what ends it is returned."""

    def __init__(self, in_flight: InFlight, router: Router, route: Route) -> None:
        self._in_flight = in_flight
        self._router = router
        self._route = route
        self._id = in_flight.request.request_id
        self._key = AttemptKey(self._id, in_flight.journal.attempt)
        self._prefill: PrefillNode | None = router.find(route.prefill) if route.prefill is not None else None
        self._decode: DecodeNode = router.find(route.decode)
        self._is_granted = self._is_admitted = self._is_prefill_done = False
        self._lost: Node | None = None
        self._ended_at_worker = [choice.is_finished for choice in in_flight.journal.choices]

    def begin(self) -> None:
        request, local = self._in_flight.request, self._route.max_local_tokens
        spec = self._in_flight.spec()
        self._router.hold(self._decode, request, computes=local >= len(request.prompt_ids))
        self._router.tell(self._decode, partial(self._decode.reserve, spec, local, unpaced=self._route.unpaced))
        if self._prefill is not None:
            self._start_prefill(self._prefill)

    def _start_prefill(self, prefill: PrefillNode) -> None:
        self._router.hold(prefill, self._in_flight.request, computes=True)
        self._router.tell(prefill, partial(prefill.start, self._in_flight.spec(), self._decode.incarnation))
        self._in_flight.keeps_pages(prefill)

    def handle(self, worker: Node, event: Any) -> AttemptEnd | None:
        router = self._router
        match event:
            case TokenSampled():
                if event.ended is not None:
                    self._ended_at_worker[event.choice] = True
            case GrantMade(grant):
                return self._granted(grant)
            case PromptStarted() if self._prefill is not None:
                router.note(self._prefill, self._id, steps=True)
            case ComputesHere():
                router.note(self._decode, self._id, steps=True)
                self._is_admitted = True
            case Admitted():
                self._is_admitted, self._lost = True, None
                router.note(self._decode, self._id, steps=True)
            case HandedOff() | PromptEnded():
                if isinstance(event, PromptEnded) or not self._in_flight.journal.has_first_tokens:
                    if self._in_flight.journal.is_finished:
                        return None
                    error = InternalError(f"{worker.key} ended without the first token of each choice")
                    return self._over(Fault.FAILED, worker, error)
                self._let_prefill_go()
            case AttemptFailed():
                return self._failed(worker, event.error)
        return None

    def _granted(self, grant: Any) -> AttemptEnd | None:
        self._is_granted = True
        self._router.note(self._decode, self._id, steps=False)
        if self._prefill is None:
            wishes = self._in_flight.plan.wishes
            try:
                key = choose_prefill(self._router.snapshot(), self._in_flight.facts, self._decode.key, FORMAT, wishes)
            except (NoWorkerError, IncompatibleError) as error:
                return self._over(Fault.UNSERVED, self._decode, error)
            self._prefill = self._router.find(key)
            self._start_prefill(self._prefill)
        self._router.tell(self._prefill, partial(self._prefill.attach, grant))
        return None

    def _let_prefill_go(self) -> None:
        self._is_prefill_done = True
        if self._prefill is not None:
            self._router.let_go(self._prefill, self._id)

    def _needs_prefill(self) -> bool:
        is_handed_over = self._is_admitted or self._is_prefill_done
        return not (is_handed_over and self._in_flight.journal.has_first_tokens)

    def _failed(self, worker: Node, error: Any) -> AttemptEnd | None:
        if worker is self._prefill and self._is_admitted and not self._needs_prefill():
            self._let_prefill_go()
            return None
        if self._lost is not None:
            return self._died(self._lost)
        prefill = self._prefill.key if self._prefill is not None else None
        return failure(error, worker.key, prefill, self._decode.key)

    def worker_lost(self, worker: Node) -> AttemptEnd | None:
        if worker is self._decode:
            return self._died(worker)
        if worker is self._prefill and self._needs_prefill():
            if not (self._is_granted and self._in_flight.journal.has_first_tokens):
                return self._died(worker)
            self._lost = worker
            self._router.kernel.after(_VERDICT_S, lambda: self._in_flight.verdict(self))
        return None

    def verdict(self) -> AttemptEnd | None:
        return self._died(self._lost) if self._lost is not None and self._needs_prefill() else None

    def _died(self, worker: Node) -> AttemptEnd:
        return self._over(Fault.DIED, worker, WorkerLostError(f"{worker.key} is lost"))

    def _over(self, fault: Fault, worker: Node, error: TandemError) -> AttemptEnd:
        prefill = self._prefill.key if self._prefill is not None else None
        return AttemptEnd(fault, worker.key, error, prefill, self._decode.key)

    def close(self) -> None:
        """Leave nothing behind, as `Attempt._close`."""
        router = self._router
        ended_by_itself = self._in_flight.journal.is_finished and all(self._ended_at_worker)
        if self._prefill is not None:
            if not ended_by_itself and not self._is_prefill_done:
                router.tell(self._prefill, partial(self._prefill.cancel, self._key))
            router.let_go(self._prefill, self._id)
        if not ended_by_itself or not self._is_admitted:
            router.tell(self._decode, partial(self._decode.cancel, self._key))
        router.let_go(self._decode, self._id)
