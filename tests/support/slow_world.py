"""Handoffs of gigabytes over a slow link, in virtual time: the real drivers and machines of both ends, pages without
bytes, and a router that does what a router does about them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from decode_worker.receiver_driver import Answer
from kvtransfer.extents import ArenaShape, Descriptor
from kvtransfer.layout import LayoutId
from kvtransfer.protocol import sender_events as sev
from kvtransfer.protocol.attempts import SenderLimits
from kvtransfer.protocol.grants import ReceiverLimits
from kvtransfer.protocol.messages import AttemptKey, Commit, FirstToken, Grant, RefusalReason
from prefill_worker.sending import SealedPages
from tandem.sim.kernel import Kernel
from tests.support.arena import Arena
from tests.support.ends import ReceiverEnd, SenderEnd
from tests.support.link import Link, LinkSpec

SENDER, RECEIVER = "prefill-0#1", "decode-0#1"
LEASE_S, GRACE_S = 10.0, 2.0  # as configured by default
TRIAL_S = 0.5  # of a connection that does not carry
# Pages of an 8 B model: 256 tokens, an extent of 1 MiB in each of 32 layers. 4 GiB are 128 of them, or 32,768 tokens.
LAYOUT = LayoutId("ab" * 32, "bfloat16", num_layers=32, num_kv_heads=8, head_dim=128, page_size=256)
PAGE_BYTES = LAYOUT.num_layers * LAYOUT.extent_bytes
PAGES_OF_4_GIB = (4 << 30) // PAGE_BYTES
SHAPE = ArenaShape(LAYOUT.num_layers, 2 * PAGES_OF_4_GIB, LAYOUT.extent_bytes)
_MOST_CALLS = 1_000_000


class MarkedPages(Arena):
    """Pages of which is known only whether they hold what was sealed."""

    def __init__(self, *, is_source: bool) -> None:
        super().__init__(SHAPE, memoryview(b""))
        self._is_source = is_source
        self._arrived: set[int] = set()  # extents, counted through the arena

    def read_extent(self, layer: int, page: int) -> memoryview:
        number = SHAPE.offset(layer, page) // SHAPE.extent_bytes
        return memoryview(b"sealed" if self._is_source or number in self._arrived else b"old")

    def land(self, descriptor: Descriptor, source: Arena, flip: int) -> None:
        first = descriptor.remote_offset // SHAPE.extent_bytes
        self._arrived.update(range(first, first + descriptor.num_bytes // SHAPE.extent_bytes))


@dataclass(slots=True)
class Told:
    """When what happened to one handoff, in seconds since the world's start; `None`: it has not."""

    admitted_s: float | None = None
    succeeded_s: float | None = None
    failed_s: float | None = None
    why: Any = None
    closed_s: float | None = None  # nothing of it is left at the sender
    quarantined_s: float | None = None
    lifted_s: float | None = None
    first_page: int = 0
    num_pages: int = 0
    commits: list[Commit] = field(default_factory=list)


class _Sending(SenderEnd):
    def __init__(self, world: SlowWorld) -> None:
        super().__init__(SENDER, world.kernel, world, world.link)
        self.world = world
        self.memory = MarkedPages(is_source=True)
        self.make_driver(
            SenderLimits(
                lease_margin_s=0.5,
                write_timeout_s=LEASE_S,
                resend_s=LEASE_S / 5,
                answer_timeout_s=LEASE_S,
                grace_s=GRACE_S,
                quarantine_cap_pages=SHAPE.num_pages // 4,
            ),
            LAYOUT,
        )

    def attach(self, grant: Grant, *, renew: bool = False) -> None:
        """As the worker does: ask, and ask again each third of a lease for as long as that is of use."""
        asked_s, decode = self.kernel.now_s, self.world.receiving

        def again() -> None:
            if self.driver.needs_lease(grant.key):
                self.attach(grant, renew=True)

        def answered(answer: Answer) -> None:
            if answer.refusal is not None:
                return
            ends_s = asked_s + LEASE_S
            if renew:
                self.driver.happened(grant.key, sev.LeaseExtended(grant.grant_id, ends_s))
            else:
                self.driver.attached(grant.key, grant, ends_s)
            self.later(LEASE_S / 3, again)

        self.link.call(lambda: decode.attach(grant, SENDER, renew=renew), answered, again)

    def succeeded(self, key: AttemptKey, stats: Any) -> None:
        self.world.told[key].succeeded_s = self.world.now_s

    def failed(self, failure: sev.Fail) -> None:
        told = self.world.told[failure.key]
        told.failed_s, told.why = self.world.now_s, failure.reason
        self.world.cancel_at_decode(failure.key)

    def closed(self, key: AttemptKey) -> None:
        self.world.told[key].closed_s = self.world.now_s

    def quarantine(self, pages: tuple[int, ...]) -> None: ...

    def release(self, pages: tuple[int, ...]) -> None: ...

    def replace_self(self, num_quarantined: int) -> None:
        self.world.replaced.append(SENDER)

    def link_hangs(self, receiver: str, why: str) -> None:
        """As the worker does, if it is told to: try the connection in vain, and have both ends close it."""
        receiving = self.world.receiving

        def closed_there() -> None:
            receiving.driver.link_closed(SENDER, is_here=False)
            self.link.send(lambda: self.driver.link_closed(RECEIVER))

        if self.world.closes_what_hangs:
            self.later(TRIAL_S, lambda: self.link.send(closed_there))


class _Receiving(ReceiverEnd):
    def __init__(self, world: SlowWorld) -> None:
        super().__init__(RECEIVER, world.kernel, world, world.link)
        self.world = world
        self.memory = MarkedPages(is_source=False)
        quarantine_cap = SHAPE.num_pages // 4
        self.make_driver(
            ReceiverLimits(lease_s=LEASE_S, grace_s=GRACE_S, ask_again_s=1.0, quarantine_cap_pages=quarantine_cap),
            LAYOUT,
        )
        self.driver.bind(self, self, self.driver.on_transport)

    def queue(self, key: AttemptKey) -> None:
        told = self.world.told[key]
        self.driver.granted(key, tuple(range(told.first_page, told.first_page + told.num_pages)), 0)

    def grant(self, grant: Grant) -> None:
        self.link.send(lambda: self.world.sending.attach(grant))

    def admit(self, grant: Grant, commit: Commit, committed_s: float) -> None:
        self.world.told[grant.key].admitted_s = self.world.now_s

    def over(
        self,
        key: AttemptKey,
        pages: tuple[int, ...],
        verified: tuple[tuple[int, int], ...],
        reason: RefusalReason,
        *,
        quarantined: bool,
    ) -> None:
        if quarantined:
            self.world.told[key].quarantined_s = self.world.now_s
        else:
            self.world.told[key].lifted_s = self.world.now_s

    def lift(self, pages: tuple[int, ...]) -> None:
        for told in self.world.told.values():
            if told.first_page in pages:
                told.lifted_s = self.world.now_s

    def refused(self, key: AttemptKey, reason: RefusalReason, detail: str) -> None: ...

    def carried_out(self) -> None: ...

    def kill_writer(self, sender: str) -> None:
        self.world.killed_s.append(self.world.now_s)

    def replace_self(self, num_quarantined: int) -> None:
        self.world.replaced.append(RECEIVER)


class SlowWorld:
    """One prefill worker, one decode worker and the link between them.

    Attributes:
        told: by handoff.
        killed_s: when the writer should have been killed.
        replaced: who asked to be replaced.
        closes_what_hangs: whether a connection by which nothing goes is closed.
    """

    def __init__(self, link: LinkSpec) -> None:
        self.kernel = Kernel()
        self._start_s = self.kernel.now_s
        self.link = Link(self.kernel, link, seed=0)
        self.told: dict[AttemptKey, Told] = {}
        self.killed_s: list[float] = []
        self.replaced: list[str] = []
        self.closes_what_hangs = False
        self.sending = _Sending(self)
        self.receiving = _Receiving(self)

    @property
    def now_s(self) -> float:
        """Since the start."""
        return self.kernel.now_s - self._start_s

    # -- what the ends need of each other (`Cluster`)

    def prefill(self, _: str) -> _Sending:
        return self.sending

    def decode(self, _: str) -> _Receiving:
        return self.receiving

    def hear(self, worker: Any, event: Any) -> None:
        raise NotImplementedError

    kill = prefill

    # -- what happens

    def start(self, num_pages: int = PAGES_OF_4_GIB) -> AttemptKey:
        """A handoff of a prompt that is computed already: all of it may be posted once there is a grant."""
        key = AttemptKey(f"r{len(self.told)}", 1)
        first_page = sum(told.num_pages for told in self.told.values())
        self.told[key] = Told(first_page=first_page, num_pages=num_pages)
        pages, driver = tuple(range(first_page, first_page + num_pages)), self.sending.driver
        driver.open(key, num_pages, RECEIVER)
        driver.computed_layers(range(LAYOUT.num_layers), pages)
        driver.sealed([SealedPages(key, range(LAYOUT.num_layers), 0, pages)])
        driver.computed(key, (FirstToken(0, 17),), self.kernel.now_s)
        self.link.send(lambda: self.receiving.driver.reserve(key))
        return key

    def cancel(self, key: AttemptKey) -> None:
        """A client goes away: the router tells both."""
        self.link.send(lambda: self.sending.driver.cancel(key))
        self.cancel_at_decode(key)

    def cancel_at_decode(self, key: AttemptKey) -> None:
        self.link.send(lambda: self.receiving.driver.cancel(key))

    def run_until(self, look: Any) -> None:
        self.kernel.run_until(lambda: True if look() else None, _MOST_CALLS)

    def run_for(self, seconds: float) -> None:
        """Until that much later."""
        end_s, passed = self.now_s + seconds, list[bool]()
        self.kernel.after(seconds, lambda: passed.append(True))
        self.run_until(lambda: passed or self.now_s > end_s)

    @property
    def num_bytes_written(self) -> int:
        return self.sending.driver.num_bytes_written
