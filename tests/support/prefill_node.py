"""A prefill worker in virtual time: the real role, driver and protocol; what `PrefillWorker` wires, by calls."""

from __future__ import annotations

from typing import Any

from decode_worker.receiver_driver import Answer
from kvtransfer.protocol import sender_events as ev
from kvtransfer.protocol.attempts import SenderLimits
from kvtransfer.protocol.messages import AttemptKey, FailureReason, Grant, RefusalReason
from prefill_worker.events import HandoffStats
from prefill_worker.role import PrefillRole
from tandem.core.errors import HandoffError, TandemError, WorkerLostError
from tandem.core.identity import Role
from tandem.worker.request import AttemptSpec
from tests.support.ends import SenderEnd
from tests.support.node import GRACE_S, LEASE_S, SESSION, Node, NodeSpec
from tests.support.scripted_model import LAYOUT, NUM_LAYERS

RESEND_S, ANSWER_S = LEASE_S / 5, LEASE_S


class PrefillNode(Node, SenderEnd):
    role = Role.PREFILL
    extent_bytes = 1 << 20  # of as many each layer goes by itself

    def __init__(self, worker_id: str, incarnation: str, spec: NodeSpec, **around: Any) -> None:
        super().__init__(worker_id, incarnation, spec, **around)
        self._targets: dict[AttemptKey, str] = {}  # by attempt: the decode worker's incarnation
        self.make_driver(
            SenderLimits(
                lease_margin_s=LEASE_S / 10,
                write_timeout_s=LEASE_S,
                resend_s=RESEND_S,
                answer_timeout_s=ANSWER_S,
                grace_s=GRACE_S,
                quarantine_cap_pages=spec.num_pages // 2,
                batch_bytes=8 * LAYOUT.extent_bytes,
                last_batch_bytes=2 * LAYOUT.extent_bytes,
            )
        )
        self.core = PrefillRole(
            **self.core_parts(), driver=self.driver, num_layers=NUM_LAYERS, extent_bytes=self.extent_bytes
        )
        self.runner.start(self.core)

    # -- what the router says

    def start(self, spec: AttemptSpec, receiver: str) -> None:
        self._targets[spec.key] = receiver
        self.driver.open(spec.key, self.scheduler.groups.num_handed_off(len(spec.prompt_ids)), receiver)
        self.runner.submit(lambda: self.core.start(SESSION, spec))

    def cancel(self, key: AttemptKey) -> None:
        self.runner.submit(lambda: self.core.cancel(key))

    def release_request(self, request_id: str) -> None:
        self.runner.submit(lambda: self.core.release_request(request_id))

    def session_ended(self) -> None:
        self.runner.submit(lambda: self.core.session_ended(SESSION))

    def attach(self, grant: Grant) -> None:
        """Become the grant's writer."""
        if self._targets.get(grant.key) != grant.receiver:  # cancelled meanwhile
            return
        if grant.receiver in self.ended:
            self._attach_failed(grant, renew=False)
        else:
            self._ask_to_attach(grant, renew=False)

    def _ask_to_attach(self, grant: Grant, *, renew: bool) -> None:
        decode, asked_s = self.cluster.decode(grant.receiver), self.kernel.now_s

        def ask() -> Answer | None:
            return decode.attach(grant, self.incarnation, renew=renew) if decode.is_alive else None

        self.link.call(
            ask,
            lambda answer: self.here(lambda: self._attach_answered(grant, answer, asked_s, renew=renew)),
            lambda: self.here(lambda: self._attach_failed(grant, renew=renew)),
        )

    def _attach_answered(self, grant: Grant, answer: Answer, asked_s: float, *, renew: bool) -> None:
        key, ends_s = grant.key, asked_s + grant.lease_s
        if answer.refusal is not None:
            if not renew and answer.refusal is not RefusalReason.ALREADY_ENDED:
                self.driver.happened(key, ev.RefusalReceived(answer.refusal, answer.detail))
            return
        if renew:
            self.driver.happened(key, ev.LeaseExtended(grant.grant_id, ends_s))
        else:
            self.driver.attached(key, grant, ends_s)
            self.core.grant_attached(key)
            self.runner.submit(lambda: self.core.attach(key))
            if grant.receiver in self.ended:
                self.driver.receiver_lost(grant.receiver)
        self._renew_later(grant)

    def _attach_failed(self, grant: Grant, *, renew: bool) -> None:
        if renew:
            self._renew_later(grant)
            return
        error = WorkerLostError(f"attach to {grant.receiver} was not answered")
        self.runner.submit(lambda: self.core.fail(grant.key, error))

    def _renew_later(self, grant: Grant) -> None:
        def renew() -> None:
            if self.driver.needs_lease(grant.key):
                self._ask_to_attach(grant, renew=True)

        self.later(grant.lease_s / 3, renew)

    # -- what decode workers say

    def decode_ended(self, receiver: str) -> None:
        """A decode worker's process has ended."""
        self.ended.add(receiver)
        self.driver.receiver_lost(receiver)
        keys = [key for key, target in self._targets.items() if target == receiver]
        self.runner.submit(lambda: self.core.receiver_ended(keys, receiver))

    # -- what the driver says

    def succeeded(self, key: AttemptKey, stats: HandoffStats) -> None:
        self.runner.submit(lambda: self.core.handed_off(key, stats))

    def failed(self, failure: ev.Fail) -> None:
        if failure.reason is FailureReason.CANCELLED:
            return  # whoever cancelled knows
        reason = failure.refusal.value if failure.refusal else failure.reason.value
        error: TandemError = HandoffError(f"the handoff failed: {reason} ({failure.detail})", reason=reason)
        error.retryable = failure.retryable
        self.runner.submit(lambda: self.core.handoff_failed(failure.key, error))

    def quarantine(self, pages: tuple[int, ...]) -> None:
        self.runner.submit(lambda: self.core.quarantine(pages))

    def release(self, pages: tuple[int, ...]) -> None:
        self.runner.submit(lambda: self.core.release(pages))

    def closed(self, key: AttemptKey) -> None:
        self._targets.pop(key, None)
        self.runner.submit(lambda: self.core.closed(key))

    def check_rest(self) -> None:
        super().check_rest()
        assert not self.core.jobs, (self.key, list(self.core.jobs))
        assert not self.driver.num_handoffs, self.key
        assert not self._targets, (self.key, self._targets)
