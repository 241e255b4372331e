"""The two ends of a handoff in virtual time: the real drivers, and what a worker's process wires around them, by calls.

What a driver reports to its role is left to the subclasses: to a role, or to a list that a test looks at.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from decode_worker.receiver_driver import Answer, ReceiverDriver
from kvtransfer.digest import digests_of
from kvtransfer.extents import ArenaShape, Descriptor, PageArea
from kvtransfer.layout import LayoutId
from kvtransfer.protocol import sender_events as sev
from kvtransfer.protocol.attempts import SenderLimits
from kvtransfer.protocol.grants import ReceiverLimits
from kvtransfer.protocol.messages import AttemptKey, Commit, CommitPart, Grant, RefusalReason
from kvtransfer.transports.base import Expectation
from kvtransfer.transports.events import PeerId, TransportEvent
from prefill_worker.links import LinkFigures
from prefill_worker.sender_driver import SenderDriver
from tandem.sim.kernel import Kernel, Timer
from tests.support.arena import Arena
from tests.support.link import Link
from tests.support.scripted_model import LAYOUT

_CONFIRM_EVERY_S, _CONFIRM_FOR_S = 0.2, 3.0


class Cluster(Protocol):
    """Who hears of a worker: its peers, by incarnation, the router, and whoever kills and replaces it."""

    def hear(self, worker: Any, event: Any) -> None: ...

    def prefill(self, incarnation: str) -> Any: ...

    def decode(self, incarnation: str) -> Any: ...

    def kill(self, incarnation: str) -> None: ...


class End:
    """A process that has an arena, and hears and does something while it is alive."""

    memory: Arena

    def __init__(self, incarnation: str, kernel: Kernel, cluster: Cluster, link: Link) -> None:
        self.incarnation = incarnation
        self.kernel = kernel
        self.cluster = cluster
        self.link = link
        self.is_alive = True
        self.ended: set[str] = set()  # peers whose processes have ended
        self.timer = Timer(kernel, lambda: self.here(self.tick))

    def later(self, delay_s: float, call: Callable[[], object]) -> None:
        """Run `call` here, if this process is alive then."""
        self.kernel.after(delay_s, lambda: self.here(call))

    def here(self, call: Callable[[], object]) -> None:
        if self.is_alive:
            call()

    def tick(self) -> None:
        raise NotImplementedError

    def deadline(self, deadline_s: float | None) -> None:
        """The driver's next one."""
        self.timer.set(deadline_s)


class SenderEnd(End):
    """What a prefill worker sends with."""

    def make_driver(self, limits: SenderLimits, layout: LayoutId = LAYOUT) -> None:
        self.links: tuple[LinkFigures, ...] = ()
        self.driver = SenderDriver(
            incarnation=self.incarnation,
            layout=layout,
            shape=self.memory.shape,
            take_digests=digests_of(self.memory.read_extent),
            limits=limits,
            callbacks=self,  # type: ignore[arg-type]
            write=self._write,
            peer=self._peer,
            clock=self.kernel.clock,
        )

    def tick(self) -> None:
        self.driver.tick()

    def _write(
        self, peer: PeerId, descriptors: Sequence[Descriptor], tag: bytes, *, may_post: Callable[[], bool]
    ) -> None:
        self.link.post(self, self.cluster.decode(peer), descriptors, tag, may_post)

    def _peer(self, receiver: str) -> tuple[PeerId, ArenaShape] | None:
        if receiver in self.ended:
            return None
        return PeerId(receiver), self.cluster.decode(receiver).memory.shape

    def hear_answer(self, receiver: str, key: AttemptKey, grant_id: str, answer: Answer) -> None:
        """To a commit, or against a part."""
        if not self.driver.has_asked(key, receiver, grant_id):
            return
        if answer.verified_at_s:
            self.driver.verified(key, answer.verified_at_s)
        if answer.refusal is not None:
            self.driver.happened(key, sev.RefusalReceived(answer.refusal, answer.detail))
        else:
            self.driver.happened(key, sev.AckReceived(grant_id))

    # -- what the driver says to decode workers

    def links_changed(self, links: tuple[LinkFigures, ...]) -> None:
        self.links = links

    def link_hangs(self, receiver: str, why: str) -> None:
        """Nobody makes connections anew here, unless a subclass does."""

    def commit_part(self, part: CommitPart) -> None:
        decode = self.cluster.decode(part.receiver)
        self.link.send(lambda: decode.hear(self, part), lambda: decode.hear_noise(self))

    def commit(self, commit: Commit, *, again: bool) -> None:
        decode = self.cluster.decode(commit.receiver)
        self.link.send(lambda: decode.hear(self, commit), lambda: decode.hear_noise(self))

    def confirm_idle(self, idle: sev.ConfirmIdle) -> None:
        """Until it is heard, for a bounded time."""
        give_up_s = self.kernel.now_s + _CONFIRM_FOR_S
        decode = self.cluster.decode(idle.receiver)

        def ask() -> Answer | None:
            return decode.confirm_idle(idle, self.incarnation) if decode.is_alive else None

        def again() -> None:
            if self.kernel.now_s < give_up_s and idle.receiver not in self.ended:
                self.link.call(ask, lambda _: None, lambda: self.later(_CONFIRM_EVERY_S, again))

        again()


class ReceiverEnd(End):
    """What a decode worker receives with."""

    def make_driver(self, limits: ReceiverLimits, layout: LayoutId = LAYOUT) -> None:
        self.expected: dict[str, Expectation] = {}  # by grant
        self.driver = ReceiverDriver(
            self.incarnation,
            layout,
            self.memory.shape,
            digests_of(self.memory.read_extent),
            limits,
            callbacks=self,  # type: ignore[arg-type]
            secret=f"the secret of {self.incarnation}".encode(),
            clock=self.kernel.clock,
        )

    def tick(self) -> None:
        self.driver.tick()

    # -- what prefill workers say

    def attach(self, grant: Grant, sender: str, *, renew: bool) -> Answer:
        if sender in self.ended:
            return Answer(RefusalReason.WRITER_EXITED, f"{sender} is not paired with")
        return self.driver.attach(grant.grant_id, sender, grant.capability, renew=renew)

    def hear(self, prefill: SenderEnd, said: Commit | CommitPart) -> None:
        """What came behind the pages, and its answer; a part that is right needs none."""
        if not self.is_alive:
            return
        if isinstance(said, Commit):
            answer = self.driver.commit(said, self.kernel.now_s)
        else:
            answer = self.driver.commit_part(said)
        if isinstance(said, Commit) or answer.refusal is not None:
            told = (self.incarnation, said.key, said.grant_id, answer)
            self.link.send(lambda: prefill.here(lambda: prefill.hear_answer(*told)))

    def hear_noise(self, prefill: SenderEnd) -> None:
        """What came is not what was sealed: it is not answered."""
        self.here(lambda: self.driver.refuse_unproven(prefill.incarnation))

    def confirm_idle(self, idle: sev.ConfirmIdle, sender: str) -> Answer:
        return self.driver.confirm_idle(idle.grant_id, sender, idle.capability)

    # -- the transport

    def on_event(self, event: TransportEvent) -> None:
        self.driver.on_transport(event)

    def expect_incoming(self, key: str, peer: PeerId, area: PageArea | None = None) -> None:
        self.expected[key] = Expectation(peer, area)

    def end_incoming(self, key: str) -> None:
        del self.expected[key]

    def poll(self) -> list[TransportEvent]:
        return []

    def disconnect(self, peer: PeerId) -> None: ...

    # -- what the driver says

    def ask_to_stop(self, sender: str, grant: Grant, reason: RefusalReason) -> None:
        prefill = self.cluster.prefill(sender)
        asked = sev.StopAsked(grant.grant_id, self.incarnation, grant.capability)

        def arrive() -> None:
            if prefill.is_alive and (left := prefill.driver.stop_asked(grant.key, asked)):
                self.link.send(lambda: self.here(lambda: self.driver.writer_draining(grant.grant_id, sender, left)))

        self.link.send(arrive)

    def kill_writer(self, sender: str) -> None:
        self.cluster.kill(sender)
