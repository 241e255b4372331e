"""A decode worker in virtual time: the real role, ledger, driver and protocol; what `DecodeWorker` wires, by calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from decode_worker.receiver_driver import Answer, ReceiverDriver
from decode_worker.role import DecodeRole
from kvtransfer.protocol import sender_events as sev
from kvtransfer.protocol.grants import ReceiverLimits
from kvtransfer.protocol.messages import AttemptKey, Commit, CommitPart, Grant, RefusalReason
from kvtransfer.transports.base import Expectation
from kvtransfer.transports.events import PeerId, TransportEvent
from tandem.core.identity import Role
from tandem.worker.request import AttemptSpec
from tests.support.link import Link
from tests.support.node import GRACE_S, LEASE_S, QUEUE_BOUND, SESSION, Cluster, Node, NodeSpec
from tests.support.scripted_model import LAYOUT
from tests.support.virtual_time import Kernel, Timer


class DecodeNode(Node):
    role = Role.DECODE

    def __init__(
        self, worker_id: str, incarnation: str, spec: NodeSpec, kernel: Kernel, cluster: Cluster, link: Link
    ) -> None:
        super().__init__(worker_id, incarnation, spec, kernel, cluster)
        self._link = link
        self._timer = Timer(kernel, lambda: self.here(lambda: self.driver.tick()))
        self.expected: dict[str, Expectation] = {}  # by grant
        self.driver = ReceiverDriver(
            incarnation,
            LAYOUT,
            self.memory.shape,
            self.memory.read_extent,
            ReceiverLimits(
                lease_s=LEASE_S,
                grace_s=GRACE_S,
                ask_again_s=LEASE_S / 10,
                remember_s=4 * LEASE_S,
                quarantine_cap_pages=spec.num_pages // 2,
            ),
            self,
            f"the secret of {incarnation}".encode(),
            kernel.clock,
        )
        self.core = DecodeRole(
            **self.core_parts(),
            driver=self.driver,
            queue_bound=QUEUE_BOUND,
            to_runner=self.runner.submit,
            to_driver=lambda call: self.later(0.0, call),
        )
        self.driver.bind(self, self.core, self.driver.on_transport)
        self.runner.start(self.core)

    # -- what the router says

    def reserve(self, spec: AttemptSpec, max_local_tokens: int) -> None:
        self.core.reserve(SESSION, spec, max_local_tokens)

    def cancel(self, key: AttemptKey) -> None:
        self.core.cancel(key)

    # -- what prefill workers say

    def attach(self, grant: Grant, sender: str, *, renew: bool) -> Answer:
        if sender in self.ended:
            return Answer(RefusalReason.WRITER_EXITED, f"{sender} is not paired with")
        return self.driver.attach(grant.grant_id, sender, grant.capability, renew=renew)

    def hear(self, prefill: Any, said: Commit | CommitPart) -> None:
        """What came behind the pages, and its answer; a part that is right needs none."""
        if not self.is_alive:
            return
        if isinstance(said, Commit):
            answer = self.driver.commit(said, self.kernel.now_s)
        else:
            answer = self.driver.commit_part(said)
        if isinstance(said, Commit) or answer.refusal is not None:
            told = (self.incarnation, said.key, said.grant_id, answer)
            self._link.send(lambda: prefill.here(lambda: prefill.hear_answer(*told)))

    def hear_noise(self, prefill: Any) -> None:
        """What came is not what was sealed: it is not answered."""
        self.here(lambda: self.driver.refuse_unproven(prefill.incarnation))

    def confirm_idle(self, idle: sev.ConfirmIdle, sender: str) -> Answer:
        return self.driver.confirm_idle(idle.grant_id, sender, idle.capability)

    def prefill_ended(self, sender: str) -> None:
        """A prefill worker's process has ended."""
        self.ended.add(sender)
        self.driver.writer_exited(sender, is_here=False)

    # -- the transport

    def expect_incoming(self, key: str, peer: PeerId, ranges: Sequence[tuple[int, int]]) -> None:
        self.expected[key] = Expectation(peer, tuple(ranges))

    def end_incoming(self, key: str) -> None:
        del self.expected[key]

    def poll(self) -> list[TransportEvent]:
        return []

    def disconnect(self, peer: PeerId) -> None: ...

    # -- what the driver says

    def ask_to_stop(self, sender: str, grant: Grant, reason: RefusalReason) -> None:
        prefill = self.cluster.prefill(sender)
        asked = sev.StopAsked(grant.grant_id, self.incarnation, grant.capability)
        self._link.send(lambda: prefill.here(lambda: prefill.driver.stop_asked(grant.key, asked)))

    def kill_writer(self, sender: str) -> None:
        self.cluster.kill(sender)

    def deadline(self, deadline_s: float | None) -> None:
        self._timer.set(deadline_s)

    def foresee(self, dues: Sequence[tuple[float, str]]) -> None: ...

    def check_rest(self) -> None:
        super().check_rest()
        assert not self.core.ledger.attempts, (self.key, list(self.core.ledger.attempts))
        assert not self.expected, (self.key, self.expected)
        assert not self.driver._handoffs.records(), "answers are forgotten in the end"
