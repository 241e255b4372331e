"""A small world for schedules: one receiver, two senders, a channel that loses, repeats and reorders, and real page
accounting at the receiver. Whoever chooses the next step is the adversary; the world checks after each that

- an extent only ever lands in a page that its own grant holds,
- no page is freed at the receiver while a living writer's posted write may still land in it,
- what is admitted is what was sealed,
- no source page is released while a write may still read it, and each is released once.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from handoff_examples import FIRST, LAYOUT

from kvtransfer.extents import PageWrite
from kvtransfer.protocol import receiver_events as rx
from kvtransfer.protocol import sender_events as tx
from kvtransfer.protocol.attempts import SenderLimits, SenderState
from kvtransfer.protocol.grants import ReceiverLimits
from kvtransfer.protocol.messages import AttemptKey, Grant
from kvtransfer.protocol.receiver import ReceiverHandoffs
from kvtransfer.protocol.sender import SenderHandoff
from tandem.core.pages import PagePool, PageState

NUM_PAGES = 6
PROMPT_PAGES = 2
NUM_LAYERS = LAYOUT.num_layers
RECEIVER_LIMITS = ReceiverLimits(lease_s=8, grace_s=4, ask_again_s=2, remember_s=20, quarantine_cap_pages=99)
SENDER_LIMITS = SenderLimits(lease_margin_s=1, write_timeout_s=5, resend_s=2, answer_timeout_s=6)

Bytes = tuple[AttemptKey, int, int] | str  # what an extent holds: (attempt, layer, index), or garbage


def digest(contents: Bytes) -> int:
    return hash(contents) & (2**64 - 1)


@dataclass
class Write:
    """A batch in the hands of a sender's transport."""

    sender: Sender
    key: AttemptKey
    write_id: int
    grant: Grant
    todo: list[PageWrite]  # not landed yet
    local_pages: frozenset[int]
    posted: bool = False
    settled: bool = False  # its end was told, and no byte of it moves any more


@dataclass
class Sender:
    """A prefill worker's incarnation. Source pages are numbered by attempt, so that none is shared."""

    name: str
    handoffs: dict[AttemptKey, SenderHandoff] = field(default_factory=dict)
    to_seal: dict[AttemptKey, list[int]] = field(default_factory=dict)  # layers left to compute
    released: set[tuple[AttemptKey, int]] = field(default_factory=set)
    alive: bool = True


class World:
    def __init__(self) -> None:
        self.now_s = 0.0
        self.pool = PagePool(NUM_PAGES, 1)
        self.receiver = ReceiverHandoffs("decode#1", LAYOUT, RECEIVER_LIMITS)
        self.memory: dict[tuple[int, int], Bytes] = {}  # (layer, page)
        self.owner: dict[int, str] = {}  # grant or request of every page that is not free
        self.queue: list[AttemptKey] = []  # reservations without pages
        self.to_verify: list[rx.VerifyDigests] = []
        self.senders = [Sender("prefill-0#1"), Sender("prefill-1#1")]
        self.writes: list[Write] = []
        self.messages: list[tuple[str, Callable[[], None]]] = []
        self.keys = (AttemptKey(f"r{n % 3}", n // 3) for n in itertools.count(3))
        self.admitted: list[AttemptKey] = []
        self.calm = False  # no more faults

    # ---- steps of the adversary

    def steps(self) -> list[Callable[[], None]]:
        """What could happen next."""
        steps: list[Callable[[], None]] = [self.pass_time]
        if not self.calm:
            steps.append(self.new_attempt)
        for n, (kind, _) in enumerate(self.messages):
            steps += [lambda n=n: self.deliver(n)] * 2
            if not self.calm:
                steps.append(lambda n=n: self.deliver(n, keep=True))
                if kind != "exit":
                    steps.append(lambda n=n: self.messages.pop(n))  # type: ignore[misc]
        if self.queue and self.pool.num_available >= PROMPT_PAGES:
            steps += [self.grant_next] * 3
        steps += [self.verify] * 3 * bool(self.to_verify)
        for write in self.writes:
            steps += self.write_steps(write)
        for sender in self.senders:
            steps += self.sender_steps(sender)
        return steps

    def write_steps(self, write: Write) -> list[Callable[[], None]]:
        if not write.posted:
            return [lambda: self.post(write)] * 2
        if not write.todo:
            return [lambda: self.complete(write)] * 2
        steps: list[Callable[[], None]] = [lambda: self.land(write)] * 3
        if not self.calm:
            steps.append(lambda: self.land(write, garbage=True))
            steps.append(lambda: self.fail(write, settled=True))
            steps.append(lambda: self.fail(write, settled=False))
        return steps

    def sender_steps(self, sender: Sender) -> list[Callable[[], None]]:
        steps: list[Callable[[], None]] = []
        if not sender.alive:
            return steps
        for key, layers in sender.to_seal.items():
            if layers:
                steps += [lambda key=key: self.seal(sender, key)] * 2
        if not self.calm:
            live = [k for k, h in sender.handoffs.items() if h.state is not SenderState.DONE]
            steps += [lambda key=key: self.cancel(sender, key) for key in live]
            if live and len(self.senders) < 5:
                steps.append(lambda: self.crash(sender))
        return steps

    def run(self, choices: Iterable[int]) -> None:
        """Let `choices` pick the steps, then let all faults end and prove that nothing leaked."""
        for choice in choices:
            steps = self.steps()
            steps[choice % len(steps)]()
            self.pool.check()
        self.settle()

    def settle(self) -> None:
        """No more loss and no more new attempts. Writers that are stuck get killed, as the protocol asks; who still
        waits for a grant, whose Reserve got lost, is told by its router that it may stop."""
        self.calm = True
        for turn in range(60):
            for sender in self.senders if turn == 30 else []:
                for key in [k for k, h in sender.handoffs.items() if h.state is SenderState.WAITING]:
                    self.to_sender(sender, key, tx.CancelRequested())
            for _ in range(500):
                steps = [s for s in self.steps() if s != self.pass_time]
                if not steps:
                    break
                steps[0]()
            self.pass_time()
        self.pool.check()
        counts = self.pool.counts()
        assert counts.reserved == counts.quarantined == 0, f"pages leaked: {counts}"
        assert counts.used == PROMPT_PAGES * len(self.admitted)
        assert self.receiver.num_quarantined_pages == 0
        assert self.receiver.records() == [], "answers are forgotten in the end"
        for sender in self.senders:
            for key, handoff in sender.handoffs.items():
                assert handoff.state is SenderState.DONE, (sender.name, key, handoff.state)
                assert not handoff.held_pages

    # ---- requests

    def new_attempt(self) -> None:
        """The router places an attempt: decode is asked for pages, prefill starts to compute."""
        key = next(self.keys)
        live = [s for s in self.senders if s.alive]
        self.say("reserve", lambda: self.to_receiver(rx.ReserveReceived(key)))
        if live:
            sender = live[key.attempt % len(live)]
            sender.handoffs[key] = SenderHandoff(key, sender.name, LAYOUT, PROMPT_PAGES, SENDER_LIMITS)
            sender.to_seal[key] = list(range(NUM_LAYERS))

    def cancel(self, sender: Sender, key: AttemptKey) -> None:
        self.say("cancel", lambda: self.to_receiver(rx.RequestCancelled(key)))
        self.say("cancel", lambda: self.to_sender(sender, key, tx.CancelRequested()))

    def pass_time(self) -> None:
        self.now_s += 1
        self.to_receiver(rx.Tick())
        for sender in self.senders:
            for key in list(sender.handoffs):
                self.to_sender(sender, key, tx.Tick())

    # ---- the channel

    def say(self, kind: str, arrive: Callable[[], None]) -> None:
        self.messages.append((kind, arrive))

    def deliver(self, n: int, keep: bool = False) -> None:
        _, arrive = self.messages[n] if keep else self.messages.pop(n)
        arrive()

    # ---- the receiver's worker

    def to_receiver(self, event: rx.ReceiverEvent) -> None:
        for told in self.receiver.handle(event, self.now_s):
            self.obey_receiver(told)

    def obey_receiver(self, told: rx.ReceiverInstruction) -> None:
        match told:
            case rx.QueueReservation(key):
                self.queue.append(key)
            case rx.DropReservation(key):
                self.queue.remove(key)
            case rx.SendGrant(grant):
                for sender in self.senders:
                    if grant.key in sender.handoffs:
                        self.say("grant", lambda sender=sender: self.attach(sender, grant))
            case rx.ConfirmAttached():
                pass  # answered in `attach`, which knows when the question was sent
            case rx.VerifyDigests():
                self.to_verify.append(told)
            case rx.AdmitRequest(grant, _):
                self.admit(grant)
            case rx.SendAck(key, grant_id):
                self.answer(key, tx.AckReceived(grant_id))
            case rx.SendRefusal(key, _, reason) if key is not None:
                self.answer(key, tx.RefusalReceived(reason))
            case rx.QuarantinePages(_, grant_id, pages):
                assert all(self.owner[p] == grant_id for p in pages)
                self.pool.quarantine(pages)
            case rx.LiftQuarantine(_, grant_id, pages):
                self.free(grant_id, pages)
                self.pool.lift(pages)
            case rx.FreePages(_, grant_id, pages):
                self.free(grant_id, pages)
                self.pool.release(pages)
            case rx.AskWriterToStop(grant_id, key, sender_name):
                self.say("stop", lambda: self.ask_to_stop(sender_name, key, grant_id))
            case rx.KillWriter(sender_name):
                self.crash(next(s for s in self.senders if s.name == sender_name))

    def grant_next(self) -> None:
        key = self.queue.pop(0)
        pages = self.pool.reserve(PROMPT_PAGES)
        assert pages is not None
        record = self.receiver.record(key)
        assert record is not None
        epoch = self.receiver._epoch + 1
        for page in pages:
            assert page not in self.owner, f"page {page} has an owner"
            self.owner[page] = f"decode#1/{epoch}"
            for layer in range(NUM_LAYERS):
                self.memory[layer, page] = "old bytes"
        self.to_receiver(rx.ReservationGranted(key, tuple(pages)))

    def verify(self) -> None:
        asked = self.to_verify.pop(0)
        for page in asked.pages:
            assert self.owner.get(page) == asked.grant_id, "pages were given away while they were read"
        wrong = tuple(
            (layer, page)
            for layer, digests in enumerate(asked.digests)
            for page, wanted in zip(asked.pages, digests, strict=True)
            if digest(self.memory[layer, page]) != wanted
        )
        self.to_receiver(rx.DigestsVerified(asked.grant_id, wrong))

    def admit(self, grant: Grant) -> None:
        for index, page in enumerate(grant.pages):
            for layer in range(NUM_LAYERS):
                assert self.memory[layer, page] == (grant.key, layer, index), "admitted what was never sealed"
            self.owner[page] = f"request {grant.key}"
        self.pool.admit(grant.pages)
        self.admitted.append(grant.key)

    def free(self, grant_id: str | None, pages: tuple[int, ...]) -> None:
        for page in pages:
            assert grant_id is None or self.owner[page] == grant_id, f"page {page} is {self.owner[page]}'s"
            for write in self.writes:
                late = write.posted and any(write.grant.pages[i] == page for i in self.indices(write))
                assert not late, f"page {page} was freed while {write.sender.name} may still write it"
            del self.owner[page]

    @staticmethod
    def indices(write: Write) -> set[int]:
        return {write.grant.pages.index(w.remote_page) for w in write.todo}

    def ask_to_stop(self, sender_name: str | None, key: AttemptKey, grant_id: str) -> None:
        for sender in self.senders:
            if not sender.alive or sender_name not in (None, sender.name):
                continue
            if key in sender.handoffs:
                self.to_sender(sender, key, tx.StopAsked(grant_id))
            elif sender_name is not None:
                self.say("idle", lambda: self.to_receiver(rx.WriterConfirmedIdle(grant_id)))

    # ---- a sender's worker

    def attach(self, sender: Sender, grant: Grant) -> None:
        """The sender asks to attach; question and answer may each get lost on the way."""
        if not sender.alive:
            return
        sent_s = self.now_s

        def arrive() -> None:
            out = self.receiver.handle(rx.GrantGivenOut(grant.grant_id, sender.name), self.now_s)
            for told in out:
                if isinstance(told, rx.ConfirmAttached):
                    ends_s = sent_s + grant.lease_s
                    confirmed = tx.GrantAttached(told.grant, ends_s)
                    self.say("attached", lambda event=confirmed: self.to_sender(sender, grant.key, event))
                else:
                    self.obey_receiver(told)

        self.say("attach", arrive)

    def answer(self, key: AttemptKey, event: tx.SenderEvent) -> None:
        for sender in self.senders:
            if key in sender.handoffs:
                self.say("answer", lambda sender=sender: self.to_sender(sender, key, event))

    def to_sender(self, sender: Sender, key: AttemptKey, event: tx.SenderEvent) -> None:
        if not sender.alive:
            return
        for told in sender.handoffs[key].handle(event, self.now_s):
            match told:
                case tx.PostWrites(write_id, grant, writes):
                    local = frozenset(w.local_page for w in writes)
                    self.writes.append(Write(sender, key, write_id, grant, list(writes), local))
                case tx.SendCommit(commit):
                    self.say("commit", lambda commit=commit: self.to_receiver(rx.CommitReceived(commit)))
                case tx.ConfirmIdle(_, grant_id):
                    self.say("idle", lambda g=grant_id: self.to_receiver(rx.WriterConfirmedIdle(g)))
                case tx.ReleasePages(_, pages):
                    self.release(sender, key, pages)

    def release(self, sender: Sender, key: AttemptKey, pages: tuple[int, ...]) -> None:
        for page in pages:
            assert (key, page) not in sender.released, f"source page {page} of {key} was released twice"
            sender.released.add((key, page))
            for write in self.writes:
                reads = write.sender is sender and write.key == key and page in write.local_pages
                assert not reads or write.settled, f"source page {page} of {key} was released under a write"

    def seal(self, sender: Sender, key: AttemptKey) -> None:
        layer = sender.to_seal[key].pop(0)
        digests = tuple(digest((key, layer, i)) for i in range(PROMPT_PAGES))
        self.to_sender(sender, key, tx.PagesSealed(layer, 0, tuple(range(PROMPT_PAGES)), digests))
        if not sender.to_seal[key]:
            self.to_sender(sender, key, tx.AllComputed(FIRST))

    def crash(self, sender: Sender) -> None:
        """The process ends; its host will say so, some time. Another incarnation takes its place.

        Killing what is dead already is answered as well: an attach may arrive after its writer's exit was told.
        """
        if not sender.alive:
            self.say("exit", lambda: self.to_receiver(rx.WriterExited(sender.name)))
            return
        sender.alive = False
        sender.handoffs.clear()
        self.writes = [w for w in self.writes if w.sender is not sender]
        self.say("exit", lambda: self.to_receiver(rx.WriterExited(sender.name)))
        name, _, life = sender.name.partition("#")
        self.senders.append(Sender(f"{name}#{int(life) + 1}"))

    # ---- writes

    def post(self, write: Write) -> None:
        handoff = write.sender.handoffs[write.key]
        if handoff.may_post(self.now_s):
            write.posted = True
            self.to_sender(write.sender, write.key, tx.WritePosted(write.write_id))
        else:
            write.todo.clear()
            self.end(write, tx.WriteFailed(write.write_id, "its grant no longer holds", settled=True))

    def land(self, write: Write, garbage: bool = False) -> None:
        moved = write.todo.pop(0)
        page, layer = moved.remote_page, moved.layer
        held = self.owner.get(page) == write.grant.grant_id
        state = self.pool.state(page)
        what = f"{write.sender.name} wrote into page {page}, which is {state.value} and {self.owner.get(page)}'s"
        assert held, what
        assert state in (PageState.RESERVED, PageState.QUARANTINED), what
        index = write.grant.pages.index(page)
        self.memory[layer, page] = "garbage" if garbage else (write.key, layer, index)
        if write.settled and not write.todo:
            self.writes.remove(write)

    def complete(self, write: Write) -> None:
        self.end(write, tx.WriteCompleted(write.write_id))

    def fail(self, write: Write, settled: bool) -> None:
        if settled:
            write.todo.clear()
            self.end(write, tx.WriteFailed(write.write_id, "injected", settled=True))
        else:
            # Its bytes may still land, any time. It is never reported again.
            event = tx.WriteFailed(write.write_id, "injected", settled=False)
            self.to_sender(write.sender, write.key, event)

    def end(self, write: Write, event: tx.SenderEvent) -> None:
        write.settled = True
        self.writes.remove(write)
        self.to_sender(write.sender, write.key, event)
