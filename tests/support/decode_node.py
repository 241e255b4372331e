"""A decode worker in virtual time: the real role, ledger, driver and protocol; what `DecodeWorker` wires, by calls."""

from __future__ import annotations

from typing import Any

from decode_worker.role import DecodeRole
from kvtransfer.protocol.grants import ReceiverLimits
from kvtransfer.protocol.messages import AttemptKey
from tandem.core.identity import Role
from tandem.worker.request import AttemptSpec
from tests.support.ends import ReceiverEnd
from tests.support.node import GRACE_S, LEASE_S, QUEUE_BOUND, SESSION, Node, NodeSpec


class DecodeNode(Node, ReceiverEnd):
    role = Role.DECODE

    def __init__(self, worker_id: str, incarnation: str, spec: NodeSpec, **around: Any) -> None:
        super().__init__(worker_id, incarnation, spec, **around)
        self.make_driver(
            ReceiverLimits(
                lease_s=LEASE_S,
                grace_s=GRACE_S,
                ask_again_s=LEASE_S / 10,
                remember_s=4 * LEASE_S,
                quarantine_cap_pages=spec.num_pages // 2,
            )
        )
        self.core = DecodeRole(
            **self.core_parts(),
            driver=self.driver,
            queue_bound=QUEUE_BOUND,
            to_runner=self.runner.submit,
            to_driver=lambda call: self.later(0.0, call),
        )
        self.driver.bind(self, self.core, self.driver.on_transport)
        self.runner.start(self.core, self.core)

    # -- what the router says

    def reserve(self, spec: AttemptSpec, max_local_tokens: int, *, unpaced: bool = False) -> None:
        self.core.reserve(SESSION, spec, max_local_tokens, unpaced=unpaced)

    def cancel(self, key: AttemptKey) -> None:
        self.core.cancel(key)

    def session_ended(self) -> None:
        self.core.session_ended(SESSION)

    # -- what prefill workers say

    def prefill_ended(self, sender: str) -> None:
        """A prefill worker's process has ended."""
        self.ended.add(sender)
        self.driver.writer_exited(sender, is_here=False)

    def check_rest(self) -> None:
        super().check_rest()
        assert not self.core.ledger.attempts, (self.key, list(self.core.ledger.attempts))
        assert not self.expected, (self.key, self.expected)
        assert not self.driver._handoffs.records(), "answers are forgotten in the end"
