"""What lies between two workers: messages and writes that take their time, and what goes wrong with some of them."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from decode_worker.receiver_driver import Answer
from kvtransfer.extents import Descriptor
from kvtransfer.transports.events import PeerId, WriteArrived, WriteCompleted, WriteFailed, WriteHandle, WritePosted
from prefill_worker.sender_driver import SenderDriver
from tandem.sim.kernel import Kernel
from tests.support.arena import Arena, move

MESSAGE_FAULTS = ("dropped message", "repeated message", "late message", "corrupt message")
WRITE_FAULTS = (
    "corrupt write", "truncated write", "failed write", "unsettled write", "lost completion", "repeated write",
    "late write",
)  # fmt: skip
# By `faults_of_writes` only: "late copy", whose bytes come once more after its end, when others may own the page.


class Source(Protocol):
    """A prefill worker."""

    incarnation: str
    is_alive: bool
    memory: Arena
    driver: SenderDriver


class Target(Protocol):
    """A decode worker."""

    incarnation: str
    is_alive: bool
    memory: Arena

    def on_event(self, event: WriteArrived) -> None: ...


@dataclass(frozen=True, slots=True)
class LinkSpec:
    """Times in seconds.

    Attributes:
        fault_share: of messages between workers, and of writes, that something happens to.
        faults_of_writes: what happens to certain writes besides, by their number, from 0.
        late_s: how much later what is late comes.
        post_s: how long a post itself takes, as over shared memory, where it copies.
        call_timeout_s: how long a call waits for its answer.
        changes: (how long after the world's start, bytes_per_s from then on), in order. While the rate is 0 no message
            arrives either.
        jitter_s: at random up to so much on top of each latency.
    """

    latency_s: float = 0.0005
    bytes_per_s: float = 200_000.0
    fault_share: float = 0.0
    faults: Sequence[str] = (*MESSAGE_FAULTS, *WRITE_FAULTS)
    faults_of_writes: Mapping[int, str] = field(default_factory=dict)
    late_s: float = 0.4
    post_s: float = 0.0
    call_timeout_s: float = 1.0
    changes: Sequence[tuple[float, float]] = ()
    jitter_s: float = 0.0

    def ends_s(self, begins_s: float, num_bytes: float) -> float:
        """When the last of so many bytes has left, which begin at `begins_s` after the start; may be infinite."""
        rate, now_s = self.bytes_per_s, begins_s
        for change_s, new_rate in self.changes:
            if change_s <= now_s:
                rate = new_rate
                continue
            if rate > 0 and now_s + num_bytes / rate <= change_s:
                break
            num_bytes, now_s, rate = num_bytes - rate * (change_s - now_s), change_s, new_rate
        return now_s + num_bytes / rate if rate > 0 else math.inf


class Link:
    """All networks of the cluster. Each prefill worker posts its writes one after the other."""

    def __init__(self, kernel: Kernel, spec: LinkSpec, seed: int) -> None:
        self.kernel = kernel
        self.spec = spec
        self.count: Counter[str] = Counter()
        self._rng = random.Random(seed)
        self._start_s = kernel.now_s
        self.messages_pass = False  # also while the rate is 0: they go by another way
        self._free_s: dict[str, float] = {}  # by sender: when its last write has left
        self._numbers = itertools.count()

    def _draw(self, of: Sequence[str]) -> str | None:
        """What happens to the next one, if anything."""
        may = [fault for fault in of if fault in self.spec.faults]
        if not may or self._rng.random() >= self.spec.fault_share:
            return None
        return self._rng.choice(may)

    def _note(self, fault: str | None) -> None:
        if fault is not None:
            self.count[fault] += 1

    # -- messages

    def send(self, arrive: Callable[[], object], corrupt: Callable[[], object] = lambda: None) -> None:
        """From one worker to another; `corrupt` is what arrives in place of a message that was changed on its way."""
        fault, latency_s = self._draw(MESSAGE_FAULTS), self._latency_s()
        if self.spec.changes and not self.messages_pass:
            latency_s += self._leaves_s(self.kernel.now_s, 0) - self.kernel.now_s
        if math.isinf(latency_s):
            return
        self._note(fault)
        match fault:
            case "dropped message":
                return
            case "corrupt message":
                self.kernel.after(latency_s, corrupt)
                return
            case "late message":
                latency_s += self.spec.late_s
            case "repeated message":
                self.kernel.after(latency_s + self._rng.random() * self.spec.late_s, arrive)
        self.kernel.after(latency_s, arrive)

    def call(
        self, ask: Callable[[], Answer | None], replied: Callable[[Answer], object], failed: Callable[[], object]
    ) -> None:
        """A call and its answer; exactly one of `replied` and `failed` follows. `ask` gives `None` where nobody is."""
        is_over = False

        def end(how: Callable[[], object]) -> None:
            nonlocal is_over
            if not is_over:
                is_over = True
                how()

        def arrive() -> None:
            answer = ask()
            if answer is not None:
                self.send(lambda: end(lambda: replied(answer)))

        self.send(arrive)
        self.kernel.after(self.spec.call_timeout_s, lambda: end(failed))

    def _latency_s(self) -> float:
        jitter_s = self.spec.jitter_s
        return self.spec.latency_s + (self._rng.random() * jitter_s if jitter_s else 0.0)

    def _leaves_s(self, begins_s: float, num_bytes: int) -> float:
        if not self.spec.changes:
            return begins_s + num_bytes / self.spec.bytes_per_s
        return self._start_s + self.spec.ends_s(begins_s - self._start_s, num_bytes)

    # -- writes

    def post(
        self,
        source: Source,
        target: Target,
        descriptors: Sequence[Descriptor],
        tag: bytes,
        may_post: Callable[[], bool],
    ) -> None:
        """Queue a write, as `TransferThread.write` does."""
        num_bytes = sum(d.num_bytes for d in descriptors)

        def post() -> None:
            if not source.is_alive:
                return
            number = next(self._numbers)
            handle = WriteHandle(number, PeerId(target.incarnation), tag, num_bytes)
            if not may_post():
                source.driver.on_transport(WriteFailed(handle, "its grant no longer holds", settled=True))
                return
            self.kernel.clock.advance(self.spec.post_s)
            begins_s = max(self.kernel.now_s, self._free_s.get(source.incarnation, 0.0))
            self._free_s[source.incarnation] = ends_s = self._leaves_s(begins_s, num_bytes)
            write = _Write(self, source, target, tuple(descriptors), handle)
            fault = self.spec.faults_of_writes.get(number) or self._draw(WRITE_FAULTS)
            self._note(fault)
            late_s = self.spec.late_s if fault == "late write" else 0.0
            if not math.isinf(ends_s):
                self.kernel.at(ends_s + self._latency_s() + late_s, lambda: write.arrive(fault))
            source.driver.on_transport(WritePosted(handle))

        self.kernel.after(0.0, post)


@dataclass(frozen=True, slots=True)
class _Write:
    link: Link
    source: Source
    target: Target
    descriptors: tuple[Descriptor, ...]
    handle: WriteHandle

    def arrive(self, fault: str | None) -> None:
        if not self.target.is_alive:
            self._tell(WriteFailed(self.handle, "the peer is gone", settled=True))
            return
        match fault:
            case "truncated write":
                self._land(self.descriptors[: len(self.descriptors) // 2])
            case "failed write":
                self._tell(WriteFailed(self.handle, "injected", settled=True))
                return
            case "unsettled write":
                self._tell(WriteFailed(self.handle, "injected", settled=False))
                self.link.kernel.after(self.link.spec.late_s, self._land_late)
                return
            case "repeated write":
                self._land(self.descriptors)
                self.link.kernel.after(self.link.spec.late_s, lambda: self.arrive(None))
                return
            case "late copy":
                self._land(self.descriptors)
                self.link.kernel.after(self.link.spec.late_s, lambda: self._land(self.descriptors))
            case _:
                self._land(self.descriptors, flip=int(fault == "corrupt write"))
        if fault != "lost completion":
            self.link.kernel.after(self.link.spec.latency_s, lambda: self._tell(WriteCompleted(self.handle)))

    def _land(self, descriptors: Sequence[Descriptor], flip: int = 0) -> None:
        if not self.source.is_alive:  # its host has closed its connections
            return
        for descriptor in descriptors:
            move(descriptor, self.source.memory, self.target.memory, flip=flip)
        self.target.on_event(WriteArrived(PeerId(self.source.incarnation), self.handle.tag))

    def _land_late(self) -> None:
        """Nobody waits for it any more."""
        if self.target.is_alive:
            self._land(self.descriptors)
        self._tell(WriteFailed(self.handle, "injected", settled=True))

    def _tell(self, event: WriteCompleted | WriteFailed) -> None:
        if self.source.is_alive:
            self.source.driver.on_transport(event)
