"""Sender driver and receiver driver in virtual time, without roles: what they tell their workers is written down."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, TypeVar

from decode_worker.receiver_driver import Answer
from kvtransfer.extents import ArenaShape
from kvtransfer.protocol import receiver_events as rev
from kvtransfer.protocol import sender_events as sev
from kvtransfer.protocol.attempts import SenderLimits
from kvtransfer.protocol.grants import ReceiverLimits
from kvtransfer.protocol.messages import AttemptKey, Commit, CommitPart, FirstToken, Grant, RefusalReason
from kvtransfer.transports.events import MessageArrived, TransportEvent
from prefill_worker.sending import SealedPages
from tandem.sim.kernel import Kernel
from tests.support.arena import Arena
from tests.support.ends import End, ReceiverEnd, SenderEnd
from tests.support.link import Link, LinkSpec
from tests.support.scripted_model import LAYOUT, NUM_LAYERS

KEY = AttemptKey("request", 1)
SENDER, RECEIVER = "prefill-0#1", "decode-0#1"
MINE, THEIRS = (ArenaShape(NUM_LAYERS, num_pages, LAYOUT.extent_bytes) for num_pages in (8, 12))
FIRST = (FirstToken(0, 17),)
LEASE_S, GRACE_S = 0.5, 0.1
_NEAR_S = 0.01  # whatever is no time limit happens within it

_T = TypeVar("_T")


class ReadArena(Arena):
    """Random bytes; `reads` has each extent, as (layer, page), that was read for a digest."""

    def __init__(self, shape: ArenaShape) -> None:
        super().__init__(shape, memoryview(bytearray(random.Random(shape.num_pages).randbytes(shape.num_bytes))))
        self.reads: list[tuple[int, int]] = []

    def read_extent(self, layer: int, page: int) -> memoryview:
        self.reads.append((layer, page))
        return super().read_extent(layer, page)


def _told(kind: str) -> Callable[..., None]:
    """A callback that is written down as it comes."""
    return lambda end, *what: end.tell(kind, *what)


class RecordingEnd(End):
    """`told` is what the driver has told its worker, in order."""

    memory: ReadArena
    driver: Any

    def __init__(self, incarnation: str, world: World, arena: ReadArena) -> None:
        super().__init__(incarnation, world.kernel, world, world.link)
        self.world = world
        self.memory = arena
        self.told: list[tuple[Any, ...]] = []

    def tell(self, *what: Any) -> None:
        self.told.append(what)

    def wait(self, *what: Any) -> tuple[Any, ...]:
        """Until the worker was told something that begins so."""
        return self.kernel.run_until(lambda: next((told for told in self.told if told[: len(what)] == what), None))

    def run(self, call: Callable[[], _T]) -> _T:
        """Call the driver, once all has happened that needs no time limit."""
        self.kernel.run_near(_NEAR_S)
        return call()

    replace_self = _told("replace_self")


class Sending(RecordingEnd, SenderEnd):
    def __init__(self, world: World) -> None:
        super().__init__(SENDER, world, ReadArena(MINE))
        self.make_driver(
            SenderLimits(
                lease_margin_s=0.05,
                write_timeout_s=0.3,
                resend_s=0.1,
                answer_timeout_s=0.4,
                grace_s=GRACE_S,
                quarantine_cap_pages=1,
            )
        )

    succeeded = _told("succeeded")
    quarantine, release, closed = _told("quarantine"), _told("release"), _told("closed")
    link_hangs = _told("link_hangs")

    def failed(self, failure: sev.Fail) -> None:
        self.tell("failed", failure.reason, failure.refusal)

    def commit_part(self, part: CommitPart) -> None:
        self.tell("part", part)
        if self.world.parts_arrive:
            super().commit_part(part)

    def commit(self, commit: Commit, *, again: bool) -> None:
        self.tell("commit", commit, again)
        if self.world.commits_arrive:
            super().commit(commit, again=again)

    def confirm_idle(self, idle: sev.ConfirmIdle) -> None:
        self.tell("confirm_idle", idle.grant_id)
        super().confirm_idle(idle)


class Receiving(RecordingEnd, ReceiverEnd):
    def __init__(self, world: World) -> None:
        super().__init__(RECEIVER, world, ReadArena(THEIRS))
        self.make_driver(
            ReceiverLimits(lease_s=LEASE_S, grace_s=GRACE_S, ask_again_s=0.05, quarantine_cap_pages=3)
        )
        self.driver.bind(self, self, self.on_event)
        self.stops = True  # it asks writers to stop
        self.hears_arrivals = True
        self.num_arrived = 0
        self.messages: list[bytes] = []  # the worker's, not the driver's

    def on_event(self, event: TransportEvent) -> None:
        if isinstance(event, MessageArrived):
            self.messages.append(event.content)
        elif self.hears_arrivals:
            self.num_arrived += 1
            super().on_event(event)

    queue, lift = _told("queue"), _told("lift")
    admit, kill_writer, disconnect = _told("admit"), _told("kill_writer"), _told("disconnect")

    def grant(self, grant: Grant) -> None:
        self.tell("grant", grant.key, grant)

    def over(
        self,
        key: AttemptKey,
        pages: tuple[int, ...],
        verified: tuple[tuple[int, int], ...],
        reason: RefusalReason,
        *,
        quarantined: bool,
    ) -> None:
        self.tell("over", pages, reason, quarantined)
        self.tell("verified", verified)

    def refused(self, key: AttemptKey, reason: RefusalReason, detail: str) -> None:
        self.tell("refused", key, reason)

    def carried_out(self) -> None: ...

    def ask_to_stop(self, sender: str, grant: Grant, reason: RefusalReason) -> None:
        self.tell("ask_to_stop", sender)
        if self.stops:
            super().ask_to_stop(sender, grant, reason)


class World:
    """Both ends, connected."""

    def __init__(self, link: LinkSpec | None = None) -> None:
        self.kernel = Kernel()
        self.link = Link(self.kernel, link or LinkSpec(), seed=0)
        self.commits_arrive = True
        self.parts_arrive = True
        self.sending = Sending(self)
        self.receiving = Receiving(self)

    @property
    def now_s(self) -> float:
        return self.kernel.now_s

    # -- what the ends need of each other (`Cluster`)

    def prefill(self, _: str) -> Sending:
        return self.sending

    def decode(self, _: str) -> Receiving:
        return self.receiving

    def hear(self, worker: Any, event: Any) -> None:
        raise NotImplementedError

    kill = prefill

    # -- what the roles say

    def grant(self, pages: tuple[int, ...] = (7, 3, 4), first_page: int = 0, key: AttemptKey = KEY) -> Grant:
        receiving = self.receiving
        receiving.run(lambda: receiving.driver.happened(rev.ReserveReceived(key)))
        receiving.run(lambda: receiving.driver.happened(rev.ReservationGranted(key, pages, first_page)))
        grant: Grant = receiving.wait("grant", key)[2]
        return grant

    def attach(self, grant: Grant) -> None:
        driver, asked_s = self.receiving.driver, self.now_s
        answer: Answer = self.receiving.run(
            lambda: driver.attach(grant.grant_id, SENDER, grant.capability, renew=False)
        )
        assert answer.refusal is None
        self.sending.run(lambda: self.sending.driver.attached(KEY, grant, asked_s + LEASE_S))

    def open(self, num_pages: int = 3) -> None:
        self.sending.run(lambda: self.sending.driver.open(KEY, num_pages, RECEIVER))

    def seal(self, pages: tuple[int, ...] = (1, 2, 5), first: int = 0, layers: tuple[int, ...] = (0, 1)) -> None:
        parts = [SealedPages(KEY, range(layer, layer + 1), first, pages) for layer in layers]
        for layer in layers:
            self.sending.run(lambda layer=layer: self.sending.driver.computed_layers(range(layer, layer + 1), pages))
        self.sending.run(lambda: self.sending.driver.sealed(parts))

    def computed(self, ago_s: float = 0.0) -> None:
        self.sending.run(lambda: self.sending.driver.computed(KEY, FIRST, self.now_s - ago_s))

    def check_bytes(self, local: tuple[int, ...], remote: tuple[int, ...]) -> None:
        for layer in range(NUM_LAYERS):
            for here, there in zip(local, remote, strict=True):
                assert self.sending.memory.read_extent(layer, here) == self.receiving.memory.read_extent(layer, there)
