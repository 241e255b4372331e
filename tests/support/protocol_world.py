"""A small world for schedules: two prefill and two decode workers with their successors, clients with journals, and a
channel that loses, repeats, delays and reorders. Bytes choose what happens next: whoever writes them is the adversary.

Workers and clients check each step (see `protocol_prefill`, `protocol_decode`, `protocol_client`). In the end all
faults stop, time goes on, fences come, and the world proves that everything has ended and nothing leaked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from kvtransfer.protocol import receiver_events as rx
from kvtransfer.protocol import sender_events as tx
from kvtransfer.protocol.messages import AttemptKey, Commit, CommitPart, Grant
from router.request.request import TokenGiven
from tests.support.protocol_client import Client
from tests.support.protocol_decode import Decode
from tests.support.protocol_lies import forge, mangle
from tests.support.protocol_prefill import PROMPT_PAGES, Prefill, Write

MAX_CLIENTS, MAX_CRASHES, MAX_REPLACEMENTS = 4, 3, 2
# Of these the loss would be that of a stream, and with it of the worker: nobody has a clock for one alone.
NEVER_DROPPED = ("exit", "receiver exit", "cancel")
FAULTS = (
    "repeated message", "dropped message", "mangled message", "corrupt write", "truncated write", "failed write",
    "unsettled write", "lost completion", "repeated write", "crashed writer", "stopped writer", "late writer",
    "replaced receiver", "stopped receiver", "client left", "forgery",
)  # fmt: skip


@dataclass(slots=True, eq=False)
class Message:
    kind: str
    to: Prefill | Decode | None  # `None`: the router
    arrive: Callable[[], Any]
    said: Commit | CommitPart | None = None


class World:
    """Args:
    choices: what happens, two bytes a step; all steps of the adversary in order.
    """

    def __init__(self, choices: bytes = b"") -> None:
        self._choices = choices
        self._at = 0
        self.now_s = 0.0
        self.prefills = [Prefill(self, f"prefill-{n}#1") for n in range(2)]
        self.decodes = [Decode(self, f"decode-{n}#1") for n in range(2)]
        self.clients: dict[str, Client] = {}
        self.messages: list[Message] = []
        self.grants: list[Grant] = []
        self.admitted: set[AttemptKey] = set()
        self.prefix_of: dict[int, tuple[int, ...]] = {}
        self.count: Counter[str] = Counter()

    def draw(self) -> int:
        """The next byte; zeros behind the last."""
        self._at += 1
        return self._choices[self._at - 1] if self._at <= len(self._choices) else 0

    def run(self) -> World:
        while self._at < len(self._choices):
            self.step(self.draw(), self.draw())
            if self._at % 64 == 0:
                self.check_pools()
        self.settle()
        return self

    # ---- the adversary

    def step(self, what: int, which: int) -> None:
        if what < 10:
            self.pass_time()
        elif what < 20:
            self.new_client(which)
        elif what < 21:
            self.crash_some(which)
        elif what < 23:
            self.stop_some(self.live_prefills(), which, "stopped writer")
        elif what < 24:
            self.replace_some(which)
        elif what < 25:
            self.stop_some(self.live_decodes(), which, "stopped receiver")
        elif what < 26:
            self.leave_some(which)
        elif what < 32:
            self.forge(which)
        else:
            fault = what - 32 if what < 72 else None
            due = (fault is not None and fault % 2 and self.due_writes()) or self.agenda()
            if due:
                due[which % len(due)](None if fault is None else fault // 2)

    def due_writes(self) -> list[Callable[[int | None], None]]:
        return [partial(self.advance, w) for p in self.live_prefills() for w in p.writes if self.can_advance(w)]

    def agenda(self) -> list[Callable[[int | None], None]]:
        """What is due, as calls that take the fault to inject, if any."""
        due: list[Callable[[int | None], None]] = [
            partial(self.deliver, m) for m in self.messages if m.to is None or not m.to.is_stopped
        ]
        due += self.due_writes()
        for prefill in self.prefills:
            if prefill.is_alive and not prefill.is_stopped:
                prompts = prefill.prompts.values()
                due += [lambda _, site=prefill, p=p: site.compute(p) for p in prompts if prefill.can_compute(p)]
        for decode in self.decodes:
            if decode.is_alive and not decode.is_stopped:
                if decode.to_verify:
                    due.append(lambda _, d=decode: d.verify())
                if decode.queue and decode.pool.num_available >= PROMPT_PAGES:
                    due.append(lambda _, d=decode: d.grant_next())
                due += [lambda _, d=decode, key=key: d.generate(key) for key in decode.running]
        return due

    def new_client(self, how: int) -> None:
        if len(self.clients) < MAX_CLIENTS:
            request_id = f"r{len(self.clients)}"
            self.clients[request_id] = Client(self, request_id, how)

    def crash_some(self, which: int) -> None:
        live = self.live_prefills()
        if len(self.prefills) < 2 + MAX_CRASHES:
            self.count["crashed writer"] += 1
            self.crash(live[which % len(live)])

    def replace_some(self, which: int) -> None:
        live = self.live_decodes()
        if len(self.decodes) < 2 + MAX_REPLACEMENTS:
            self.count["replaced receiver"] += 1
            self.replace(live[which % len(live)])

    def stop_some(self, sites: list[Any], which: int, fault: str) -> None:
        site = sites[which % len(sites)]
        site.is_stopped = not site.is_stopped
        self.count[fault] += site.is_stopped

    def leave_some(self, which: int) -> None:
        live = [c for c in self.clients.values() if c.ended is None]
        if live:
            self.count["client left"] += 1
            live[which % len(live)].leave()

    def forge(self, which: int) -> None:
        """Somebody without the capability speaks about a grant, under the name of its writer."""
        if not self.grants:
            return
        grant = self.grants[which // 5 % len(self.grants)]
        capability = self.grants[which % len(self.grants)].capability if which % 2 else b"guessed"
        if capability == grant.capability:
            return
        decode = self.decode_of(grant.receiver)
        record = decode.machine.record(grant.key)
        sender = record.sender if record is not None and record.sender is not None else self.prefills[0].name
        self.count["forgery"] += 1
        decode.happened(forge(grant, sender, capability, which), answers=False)

    # ---- messages

    def say(self, kind: str, to: Prefill | Decode | None, arrive: Callable[[], Any]) -> None:
        self.messages.append(Message(kind, to, arrive))

    def deliver(self, message: Message, fault: int | None) -> None:
        match fault:
            case None:
                self.messages.remove(message)
                message.arrive()
            case _ if fault % 3 == 0:
                self.count["repeated message"] += 1
                message.arrive()
            case _ if fault % 3 == 1 and message.kind not in NEVER_DROPPED:
                self.count["dropped message"] += 1
                self.messages.remove(message)
            case _ if message.said is not None:
                self.count["mangled message"] += 1
                event = mangle(message.said, fault // 3)
                self.decode_of(message.said.receiver).happened(event, answers=False)
            case _:
                self.deliver(message, None)

    def tell_receiver(
        self, kind: str, receiver: str, event: rx.ReceiverEvent, agreed: Callable[[], None] | None = None
    ) -> None:
        """A call to the address of a decode worker: whoever lives there when it arrives gets it."""
        prefill = next((p for p in self.prefills if p.name == getattr(event, "sender", None)), None)

        def arrive() -> None:
            now_there = self.living_at(receiver)
            if now_there.is_stopped:  # a successor of whom it was sent to
                message.to = now_there
                self.messages.append(message)
            elif now_there.happened(event) and agreed is not None:
                self.say("answer", prefill, agreed)

        said = event.commit if isinstance(event, rx.CommitReceived) else getattr(event, "part", None)
        message = Message(kind, self.living_at(receiver), arrive, said)
        self.messages.append(message)

    def answer(self, key: AttemptKey, event: tx.SenderEvent) -> None:
        for prefill in self.prefills:
            if key in prefill.handoffs:
                self.say("answer", prefill, partial(prefill.happened, key, event))

    def tell_failed(self, key: AttemptKey, side: str) -> None:
        client = self.clients[key.request_id]
        self.say("failed", None, lambda: client.failed(key.attempt, side))

    def tell_admitted(self, key: AttemptKey) -> None:
        self.say("admitted", None, partial(self.clients[key.request_id].admitted, key.attempt))

    def tell_token(self, token: TokenGiven, key: AttemptKey) -> None:
        self.say("token", None, partial(self.clients[key.request_id].take, token))

    def sample(self, prefix: tuple[int, ...]) -> int:
        token_id = len(self.prefix_of)
        self.prefix_of[token_id] = prefix
        return token_id

    # ---- writes

    def can_advance(self, write: Write) -> bool:
        if write.posted and write.todo:
            return True  # also while its sender is stopped
        decode = self.decode_of(write.grant.receiver)
        waits = write.posted and (write.lost or decode.is_stopped)
        return not waits and not write.prefill.is_stopped

    def advance(self, write: Write, fault: int | None) -> None:
        prefill = write.prefill
        if not write.posted:
            if prefill.is_stopped:
                return
            prefill.post(write)
        elif fault is not None and not prefill.is_stopped:
            self.spoil(write, fault % 7)
        elif write.todo:
            while write.todo:
                prefill.land(write)
        elif not self.decode_of(write.grant.receiver).is_alive:
            write.lost = True
            prefill.hear_end(write, tx.WriteFailed(write.write_id, "the peer is gone", settled=False))
        else:
            prefill.settle(write, tx.WriteCompleted(write.write_id))

    def spoil(self, write: Write, how: int) -> None:
        prefill = write.prefill
        if how < 2 and write.todo:
            prefill.land(write)
        elif how == 2 and write.todo:
            self.count["corrupt write"] += 1
            prefill.land(write, garbage=True)
        elif how == 3 and write.landed:
            self.count["repeated write"] += 1
            prefill.land(write, again=True)
        elif how == 4 and not write.lost:
            self.count["truncated write" if write.todo else "complete write"] += 1
            prefill.settle(write, tx.WriteCompleted(write.write_id))
        elif how == 5 and not write.lost:
            self.count["failed write"] += 1
            prefill.settle(write, tx.WriteFailed(write.write_id, "injected", settled=True))
        elif how == 6 and not write.lost:
            write.lost = True
            self.count["unsettled write" if write.todo else "lost completion"] += 1
            if write.todo:  # its bytes may still land, any time; it is never reported again
                prefill.hear_end(write, tx.WriteFailed(write.write_id, "injected", settled=False))

    # ---- processes

    def live_prefills(self) -> list[Prefill]:
        return [p for p in self.prefills if p.is_alive]

    def live_decodes(self) -> list[Decode]:
        return [d for d in self.decodes if d.is_alive]

    def prefill_of(self, name: str) -> Prefill:
        return next(p for p in self.prefills if p.name == name)

    def decode_of(self, name: str) -> Decode:
        return next(d for d in self.decodes if d.name == name)

    def living_at(self, name: str) -> Decode:
        """The newest life of the worker that had this incarnation."""
        worker_id = name.partition("#")[0]
        return next(d for d in reversed(self.decodes) if d.name.partition("#")[0] == worker_id)

    def crash(self, prefill: Prefill, asked_by: Decode | None = None) -> None:
        """The process ends; its host will say so, some time. Another incarnation takes its place.

        Killing what is dead already is answered as well: an attach may arrive after its writer's exit was told.
        """
        told = [asked_by] if asked_by is not None and not prefill.is_alive else self.live_decodes()
        for decode in told:
            self.say("exit", decode, partial(decode.happened, rx.WriterExited(prefill.name)))
        if prefill.is_alive:
            prefill.is_alive = prefill.is_stopped = False
            prefill.handoffs.clear()
            prefill.writes.clear()
            self.lose(prefill, "prefill")
            self.prefills.append(Prefill(self, next_life(prefill.name)))

    def replace(self, decode: Decode) -> None:
        """The receiver's process ends, and its memory with it."""
        decode.is_alive = decode.is_stopped = False
        for prefill in self.live_prefills():
            self.tell_receiver_exit(prefill, decode.name)
        self.lose(decode, "decode")
        self.decodes.append(Decode(self, next_life(decode.name)))

    def tell_receiver_exit(self, prefill: Prefill, name: str) -> None:
        self.say("receiver exit", prefill, partial(self.receiver_exited, prefill, name))

    def receiver_exited(self, prefill: Prefill, name: str) -> None:
        prefill.writes = [w for w in prefill.writes if w.grant.receiver != name]
        prefill.links.pop(name, None)
        for key in [k for k, h in prefill.handoffs.items() if h.grant is not None and h.grant.receiver == name]:
            prefill.happened(key, tx.ReceiverExited())

    def lose(self, site: Prefill | Decode, side: str) -> None:
        """The router's streams to it break."""
        for client in self.clients.values():
            if site in (client.prefill, client.decode):
                self.say("lost", None, partial(client.failed, client.journal.attempt, side))

    # ---- time, and the end

    def pass_time(self) -> None:
        self.now_s += 1
        for client in self.clients.values():
            client.pass_time()
        for decode in self.decodes:
            if not decode.is_stopped:
                decode.happened(rx.Tick())
        for prefill in self.prefills:
            if prefill.is_alive:
                self.count["late writer"] += prefill.is_stopped and any(
                    w.posted and w.todo and self.decode_of(w.grant.receiver).owner.get(w.todo[0].remote_page)
                    for w in prefill.writes
                )
                prefill.pass_time()

    def settle(self) -> None:
        """No more faults. Who is stopped goes on only later, so that the protocol has to do with it."""
        for turn in range(150):
            if turn == 12:
                for site in (*self.prefills, *self.decodes):
                    site.is_stopped = False
            while agenda := self.agenda():
                agenda[0](None)
            if turn > 12 and self.is_over():
                break
            self.pass_time()
        self.check_pools()
        self.check_over()

    def is_over(self) -> bool:
        return (
            not self.messages
            and all(c.ended is not None for c in self.clients.values())
            and not any(p.handoffs for p in self.live_prefills())
            and not any(d.machine.records() for d in self.live_decodes())
        )

    def check_pools(self) -> None:
        for site in (*self.live_prefills(), *self.live_decodes()):
            site.pool.check()

    def check_over(self) -> None:
        waiting = [c.request_id for c in self.clients.values() if c.ended is None]
        assert not waiting, f"these requests wait for ever: {waiting}"
        for site in (*self.live_prefills(), *self.live_decodes()):
            counts = site.pool.counts()
            assert counts.used == counts.reserved == counts.quarantined == 0, f"{site.name} leaks: {counts}"
        for prefill in self.live_prefills():
            states = {str(k): h.state.value for k, h in prefill.handoffs.items()}
            assert not states, f"handoffs of {prefill.name} never end: {states}"
        for decode in self.live_decodes():
            assert decode.machine.num_quarantined_pages == 0
            assert not decode.machine.records(), "answers are forgotten in the end"
            left = [*decode.queue, *decode.owner, *decode.wanted, *decode.cached]
            assert not left, f"{decode.name} still has {left}"


def next_life(name: str) -> str:
    worker_id, _, life = name.partition("#")
    return f"{worker_id}#{int(life) + 1}"
