"""A prefill worker of the world: the real protocol machine and real page accounting, its transport pretended.

It checks, whatever the adversary does, that nothing is posted after the lease, and that no source page is released
under a write that may still read it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvtransfer.extents import PageWrite
from kvtransfer.protocol import receiver_events as rx
from kvtransfer.protocol import sender_events as tx
from kvtransfer.protocol.arrivals import ExtentRun
from kvtransfer.protocol.attempts import SenderLimits, SenderState
from kvtransfer.protocol.link import Link
from kvtransfer.protocol.link_window import LinkLimits
from kvtransfer.protocol.messages import AttemptKey, FailureReason, FirstToken, Grant
from kvtransfer.protocol.sender import SenderHandoff
from router.request.request import TokenGiven
from tandem.core.pages import PagePool, PageState
from tests.support.scripted_model import LAYOUT

if TYPE_CHECKING:
    from tests.support.protocol_world import World

POOL_PAGES = 7
PROMPT_PAGES = 3
NUM_LAYERS = LAYOUT.num_layers
SENDER_LIMITS = SenderLimits(lease_margin_s=1, write_timeout_s=3, resend_s=1, answer_timeout_s=4)
# A window of a few extents: writes wait for each other.
_EXTENT = LAYOUT.extent_bytes
LINK_LIMITS = LinkLimits(
    batch_bytes=8 * _EXTENT,
    first_bytes=8 * _EXTENT,
    least_bytes=4 * _EXTENT,
    drain_s=0.5,
    write_timeout_s=3,
    slowest_bytes_per_s=1e9,
)
CHUNKS = (((0, 3),), ((0, 1), (1, 3)), ((0, 2), (2, 3)), ((0, 1), (1, 2), (2, 3)))

Bytes = tuple[AttemptKey, int, int] | str  # what an extent holds: (attempt, layer, index in the prompt), or garbage


def digest(contents: Bytes) -> int:
    return hash(contents) & (2**64 - 1)


@dataclass(slots=True, eq=False)
class Write:
    """A batch in the hands of a sender's transport."""

    prefill: Prefill
    key: AttemptKey
    write_id: int
    grant: Grant
    runs: tuple[ExtentRun, ...]  # what its tag names
    todo: list[PageWrite]  # not landed yet
    local_pages: frozenset[int]
    landed: list[PageWrite] = field(default_factory=list)
    posted: bool = False
    lost: bool = False  # its end is never told

    def may_land_in(self, page: int) -> bool:
        return self.posted and any(w.remote_page == page for w in (*self.todo, *self.landed))


@dataclass(slots=True, eq=False)
class Prompt:
    """A prompt that a prefill worker computes: (layer, first page, last page) are left to seal."""

    key: AttemptKey
    output: tuple[int, ...]
    steps: list[tuple[int, int, int]]
    pages: list[int] | None = None  # the sequence's hold
    sealed: set[int] = field(default_factory=set)  # the driver's hold
    is_over: bool = False  # nothing more is computed


class Prefill:
    """A prefill worker's incarnation."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.pool = PagePool(POOL_PAGES, 1)
        self.handoffs: dict[AttemptKey, SenderHandoff] = {}
        self.prompts: dict[AttemptKey, Prompt] = {}
        self.seen: set[AttemptKey] = set()
        self.writes: list[Write] = []
        self.links: dict[str, Link] = {}  # by receiver
        self.is_alive = True
        self.is_stopped = False

    def start(self, key: AttemptKey, receiver: str, output: tuple[int, ...], how: int) -> None:
        if key in self.seen:
            return
        self.seen.add(key)
        self.handoffs[key] = SenderHandoff(key, self.name, receiver, LAYOUT, PROMPT_PAGES, SENDER_LIMITS)
        chunks = CHUNKS[how % len(CHUNKS)]
        steps = [(layer, first, last) for first, last in chunks for layer in range(NUM_LAYERS)]
        self.prompts[key] = Prompt(key, output, steps)

    def cancel(self, key: AttemptKey) -> None:
        self.seen.add(key)  # it may have overtaken its start
        self.happened(key, tx.CancelRequested())

    def can_compute(self, prompt: Prompt) -> bool:
        return not prompt.is_over and (prompt.pages is not None or self.pool.num_available >= PROMPT_PAGES)

    def compute(self, prompt: Prompt) -> None:
        """One layer of one chunk; behind the last, the first token."""
        if prompt.pages is None:
            prompt.pages = self.pool.allocate(PROMPT_PAGES)
            assert prompt.pages is not None
        key, (layer, first, last) = prompt.key, prompt.steps.pop(0)
        pages = tuple(prompt.pages[first:last])
        if layer == 0:
            self.pool.share(pages)
            prompt.sealed.update(pages)
        digests = tuple(digest((key, layer, index)) for index in range(first, last))
        self.happened(key, tx.PagesSealed(layer, first, pages, (digests,)))
        if prompt.steps or prompt.is_over:
            return
        if not prompt.output:
            first_id = self.world.sample(())
            self.world.tell_token(TokenGiven(key.attempt, 0, 0, first_id), key)
            prompt.output = (first_id,)
        self.leave_batch(prompt)
        self.happened(key, tx.AllComputed((FirstToken(0, prompt.output[0]),)))

    def leave_batch(self, prompt: Prompt) -> None:
        if not prompt.is_over:
            prompt.is_over = True
            if prompt.pages is not None:
                self.pool.release(prompt.pages)

    def happened(self, key: AttemptKey, event: tx.SenderEvent) -> None:
        self.feed(key, event)
        if self.is_alive:
            for link in list(self.links.values()):
                while (turn := link.next_turn()) is not None:
                    self.feed(turn[0], tx.RoomGiven(turn[1]))

    def feed(self, key: AttemptKey, event: tx.SenderEvent) -> None:
        handoff = self.handoffs.get(key)
        if handoff is None or not self.is_alive:
            return
        for told in handoff.handle(event, self.world.now_s):
            self.obey(key, told)
        if handoff.grant is not None:
            link = self.links.setdefault(handoff.grant.receiver, Link(LINK_LIMITS))
            (link.want if handoff.wants_room else link.leave)(key)
        if handoff.state is SenderState.DONE and self.handoffs.pop(key, None) is not None:
            self.close(self.prompts.pop(key))

    def close(self, prompt: Prompt) -> None:
        """The driver's hold ends."""
        self.leave_batch(prompt)
        quarantined = [p for p in prompt.sealed if self.pool.state(p) is PageState.QUARANTINED]
        self.pool.lift(quarantined)
        self.pool.release(sorted(prompt.sealed.difference(quarantined)))

    def obey(self, key: AttemptKey, told: tx.SenderInstruction) -> None:
        world = self.world
        match told:
            case tx.PostWrites(write_id, grant, writes, runs, num_bytes):
                local = frozenset(w.local_page for w in writes)
                self.links[grant.receiver].post(key, write_id, num_bytes, world.now_s)
                self.writes.append(Write(self, key, write_id, grant, runs, list(writes), local))
            case tx.SendCommitPart(part):
                world.tell_receiver("part", part.receiver, rx.PartReceived(part))
            case tx.SendCommit(commit):
                world.tell_receiver("commit", commit.receiver, rx.CommitReceived(commit))
            case tx.ConfirmIdle(_, grant_id, receiver, capability):
                world.tell_receiver("idle", receiver, rx.WriterConfirmedIdle(grant_id, self.name, capability))
            case tx.QuarantinePages(_, pages):
                self.leave_batch(self.prompts[key])
                self.pool.quarantine([p for p in pages if self.pool.references(p) == 1])
            case tx.ReleasePages(_, pages):
                for write in self.writes:
                    reads = write.key == key and write.posted and not write.local_pages.isdisjoint(pages)
                    assert not reads, f"source pages {pages} of {key} were released under a write"
            case tx.Fail(_, reason):
                self.leave_batch(self.prompts[key])
                if reason is not FailureReason.CANCELLED:
                    world.tell_failed(key, "prefill")
            case tx.Succeed():
                assert key in world.admitted, f"{key} succeeded and was never admitted"

    def attach(self, grant: Grant) -> None:
        """The router brings a grant: ask to attach."""
        if grant.key in self.handoffs:
            world, sent_s = self.world, self.world.now_s
            event = rx.GrantGivenOut(grant.grant_id, self.name, grant.capability)
            world.tell_receiver("attach", grant.receiver, event, lambda: self.attached(grant, sent_s + grant.lease_s))

    def attached(self, grant: Grant, lease_ends_s: float) -> None:
        if grant.key in self.handoffs:
            self.happened(grant.key, tx.GrantAttached(grant, lease_ends_s))
            if not self.world.decode_of(grant.receiver).is_alive:  # it is watched from the pairing on
                self.world.tell_receiver_exit(self, grant.receiver)
        else:
            self.confirm_idle(grant.receiver, grant.grant_id, grant.capability)

    def stop_asked(self, grant: Grant) -> None:
        handoff = self.handoffs.get(grant.key)
        if handoff is None:
            self.confirm_idle(grant.receiver, grant.grant_id, grant.capability)
            return
        self.happened(grant.key, tx.StopAsked(grant.grant_id, grant.receiver, grant.capability))
        if num_bytes := handoff.num_bytes_draining(grant.grant_id):
            decode = self.world.decode_of(grant.receiver)
            draining = rx.WriterDraining(grant.grant_id, self.name, num_bytes)
            self.world.say("draining", decode, lambda: decode.happened(draining))

    def confirm_idle(self, receiver: str, grant_id: str, capability: bytes) -> None:
        self.world.tell_receiver("idle", receiver, rx.WriterConfirmedIdle(grant_id, self.name, capability))

    def pass_time(self) -> None:
        if self.is_stopped:
            return
        for link in self.links.values():
            overdue = link.find_overdue(self.world.now_s)
            for key in overdue.keys if overdue is not None else ():
                self.feed(key, tx.WriteOverdue(overdue.detail))
        for key in list(self.handoffs):
            self.happened(key, tx.Tick())
            handoff = self.handoffs.get(key)
            if self.world.now_s % 2 and handoff is not None and handoff.needs_lease and handoff.grant is not None:
                self.renew(handoff.grant)

    def renew(self, grant: Grant) -> None:
        extended = tx.LeaseExtended(grant.grant_id, self.world.now_s + grant.lease_s)
        event = rx.LeaseRenewed(grant.grant_id, self.name, grant.capability)
        self.world.tell_receiver("renew", grant.receiver, event, lambda: self.happened(grant.key, extended))

    # ---- its transport

    def post(self, write: Write) -> None:
        handoff = self.handoffs[write.key]
        if handoff.may_post(self.world.now_s):
            decode = self.world.decode_of(write.grant.receiver)
            record = decode.machine.record(write.key) if decode.is_alive else None
            assert record is None or self.world.now_s < record.lease_ends_s, f"{write.key} posts after its lease"
            write.posted = True
        else:
            self.settle(write, tx.WriteFailed(write.write_id, "its grant no longer holds", settled=True))

    def settle(self, write: Write, event: tx.SenderEvent) -> None:
        """No byte of it moves any more."""
        self.writes.remove(write)
        self.hear_end(write, event)

    def hear_end(self, write: Write, event: tx.SenderEvent) -> None:
        """Its transport tells of it."""
        link, now_s = self.links[write.grant.receiver], self.world.now_s
        if isinstance(event, tx.WriteCompleted):
            link.complete(write.key, write.write_id, now_s)
        else:
            link.fail(write.key, write.write_id)
        self.happened(write.key, event)

    def land(self, write: Write, *, garbage: bool = False, again: bool = False) -> None:
        """One extent reaches the receiver's memory; a retransmission does so `again`."""
        moved = write.landed[0] if again else write.todo.pop(0)
        if not again:
            write.landed.append(moved)
        decode = self.world.decode_of(write.grant.receiver)
        if decode.is_alive:
            index = write.grant.pages.index(moved.remote_page)
            contents: Bytes = (write.key, moved.layer, write.grant.first_page + index)
            decode.take_bytes(write, index, moved, "garbage" if garbage else contents)
            if write.write_id % 3:  # of the others it never hears
                decode.hear_arrival(write)
