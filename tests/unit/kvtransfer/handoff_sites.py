"""The workers of the world: real protocol machines and real page accounting, the memory between them pretended.

What they check, whatever the adversary does:

- an extent only ever lands in a page that its own grant holds, and never after it was verified,
- no page is freed at the receiver while a living writer's posted write may still land in it,
- what is admitted, or kept as a cached page, is what was sealed; and it was committed for this very grant,
- nothing is posted after the lease, and no source page is released under a write that may still read it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from handoff_client import NUM_TOKENS
from handoff_examples import LAYOUT

from kvtransfer.extents import PageWrite
from kvtransfer.protocol import receiver_events as rx
from kvtransfer.protocol import sender_events as tx
from kvtransfer.protocol.attempts import SenderLimits, SenderState
from kvtransfer.protocol.grants import GrantState, ReceiverLimits
from kvtransfer.protocol.messages import AttemptKey, Commit, FailureReason, FirstToken, Grant, RefusalReason
from kvtransfer.protocol.receiver import ReceiverHandoffs
from kvtransfer.protocol.sender import SenderHandoff
from router.request import TokenGiven
from tandem.core.pages import PagePool, PageState

if TYPE_CHECKING:
    from handoff_world import World

POOL_PAGES = 7
PROMPT_PAGES = 3
NUM_LAYERS = LAYOUT.num_layers
RECEIVER_LIMITS = ReceiverLimits(lease_s=5, grace_s=2, ask_again_s=1, remember_s=5, quarantine_cap_pages=99)
SENDER_LIMITS = SenderLimits(lease_margin_s=1, write_timeout_s=3, resend_s=1, answer_timeout_s=4)
CHUNKS = (((0, 3),), ((0, 1), (1, 3)), ((0, 2), (2, 3)), ((0, 1), (1, 2), (2, 3)))

Bytes = tuple[AttemptKey, int, int] | str  # what an extent holds: (attempt, layer, index in the prompt), or garbage


def digest(contents: Bytes) -> int:
    return hash(contents) & (2**64 - 1)


# ---- the sender's side


@dataclass(slots=True, eq=False)
class Write:
    """A batch in the hands of a sender's transport."""

    prefill: Prefill
    key: AttemptKey
    write_id: int
    grant: Grant
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
    sealed: set[int] = field(default_factory=set)  # the desk's hold
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
        self.is_alive = True
        self.is_stopped = False

    def start(self, key: AttemptKey, output: tuple[int, ...], how: int) -> None:
        if key in self.seen:
            return
        self.seen.add(key)
        self.handoffs[key] = SenderHandoff(key, self.name, LAYOUT, PROMPT_PAGES, SENDER_LIMITS)
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
        self.happened(key, tx.PagesSealed(layer, first, pages, digests))
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
        handoff = self.handoffs.get(key)
        if handoff is None or not self.is_alive:
            return
        for told in handoff.handle(event, self.world.now_s):
            self.obey(key, told)
        if handoff.state is SenderState.DONE and self.handoffs.pop(key, None) is not None:
            self.close(self.prompts.pop(key))

    def close(self, prompt: Prompt) -> None:
        """The desk's hold ends."""
        self.leave_batch(prompt)
        quarantined = [p for p in prompt.sealed if self.pool.state(p) is PageState.QUARANTINED]
        self.pool.lift(quarantined)
        self.pool.release(sorted(prompt.sealed.difference(quarantined)))

    def obey(self, key: AttemptKey, told: tx.SenderInstruction) -> None:
        world = self.world
        match told:
            case tx.PostWrites(write_id, grant, writes):
                local = frozenset(w.local_page for w in writes)
                self.writes.append(Write(self, key, write_id, grant, list(writes), local))
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
        if grant.key in self.handoffs:
            self.happened(grant.key, tx.StopAsked(grant.grant_id, grant.receiver, grant.capability))
        else:
            self.confirm_idle(grant.receiver, grant.grant_id, grant.capability)

    def confirm_idle(self, receiver: str, grant_id: str, capability: bytes) -> None:
        self.world.tell_receiver("idle", receiver, rx.WriterConfirmedIdle(grant_id, self.name, capability))

    def pass_time(self) -> None:
        if self.is_stopped:
            return
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
            self.happened(write.key, tx.WritePosted(write.write_id))
        else:
            self.settle(write, tx.WriteFailed(write.write_id, "its grant no longer holds", settled=True))

    def settle(self, write: Write, event: tx.SenderEvent) -> None:
        """No byte of it moves any more."""
        self.writes.remove(write)
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


# ---- the receiver's side


class Decode:
    """A decode worker's incarnation."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.machine = ReceiverHandoffs(name, LAYOUT, RECEIVER_LIMITS, secret=f"the secret of {name}".encode())
        self.pool = PagePool(POOL_PAGES, 1)
        self.memory: dict[tuple[int, int], Bytes] = {}  # (layer, page)
        self.owner: dict[int, str] = {}  # grant of every page that is reserved or in quarantine
        self.kept: dict[int, tuple[Bytes, ...]] = {}  # what a cached page held when it was published
        self.queue: list[AttemptKey] = []  # reservations without pages
        self.cached: dict[AttemptKey, list[int]] = {}  # pages that a grant found in the cache
        self.wanted: dict[AttemptKey, tuple[int, ...]] = {}  # journal of each attempt that a router wants
        self.running: dict[AttemptKey, tuple[list[int], list[int]]] = {}  # pages and output of what generates
        self.to_verify: list[rx.VerifyDigests | rx.VerifyPart] = []
        self.is_alive = True
        self.is_stopped = False

    def reserve(self, key: AttemptKey, output: tuple[int, ...]) -> None:
        for older in [k for k in (*self.wanted, *self.running) if k.request_id == key.request_id]:
            if older.attempt < key.attempt:
                self.cancel(older)
        if self.machine.record(key) is None:
            self.wanted[key] = output
        self.happened(rx.ReserveReceived(key))

    def cancel(self, key: AttemptKey) -> None:
        self.wanted.pop(key, None)
        running = self.running.pop(key, None)
        if running is not None:
            self.pool.release(running[0])
        self.happened(rx.RequestCancelled(key))

    def happened(self, event: rx.ReceiverEvent, answers: bool = True) -> bool:
        """Whether the machine agreed to it. `answers`: those who asked are told."""
        if not self.is_alive:
            return False
        agreed = True
        for told in self.machine.handle(event, self.world.now_s):
            if isinstance(told, rx.SendRefusal):
                agreed = False
                if not answers:
                    continue
            self.obey(told)
        return agreed

    def obey(self, told: rx.ReceiverInstruction) -> None:
        world = self.world
        match told:
            case rx.QueueReservation(key):
                self.queue.append(key)
            case rx.DropReservation(key):
                self.queue.remove(key)
            case rx.SendGrant(grant):
                world.grants.append(grant)
                for prefill in world.prefills:
                    if grant.key in prefill.handoffs:
                        world.say("grant", prefill, lambda p=prefill: p.attach(grant))
            case rx.VerifyDigests() | rx.VerifyPart():
                self.to_verify.append(told)
            case rx.AdmitRequest(grant, commit):
                self.admit(grant, commit)
            case rx.SendAck(key, grant_id):
                world.answer(key, tx.AckReceived(grant_id))
            case rx.SendRefusal(key, grant_id, reason) if key is not None:
                world.answer(key, tx.RefusalReceived(reason))
                if grant_id is None:
                    self.wanted.pop(key, None)
                    world.tell_failed(key, "decode")
            case rx.QuarantinePages(key, grant_id, pages, verified):
                assert all(self.owner[p] == grant_id for p in pages)
                self.pool.quarantine(pages)
                self.over(key, grant_id, verified)
            case rx.FreePages(key, grant_id, pages, verified):
                self.free(grant_id, pages)
                self.pool.release(pages)
                self.over(key, grant_id, verified)
            case rx.LiftQuarantine(_, grant_id, pages):
                self.free(grant_id, pages)
                self.pool.lift(pages)
            case rx.AskWriterToStop(grant, sender):
                prefill = world.prefill_of(sender)
                world.say("stop", prefill, lambda: prefill.stop_asked(grant))
            case rx.KillWriter(sender):
                world.count["killed by the protocol"] += 1
                world.crash(world.prefill_of(sender), self)

    def over(self, key: AttemptKey, grant_id: str | None, verified: tuple[tuple[int, int], ...]) -> None:
        """The grant ended without admission: keep what is verified, and tell the router."""
        record = self.machine.record(key)
        assert record is not None
        for index, page in verified:
            self.check_untouchable(grant_id, page)
            self.keep(key, record.held.first_page + index, page)
            self.world.count["kept pages"] += 1
        self.pool.release(self.cached.pop(key, []))
        if self.wanted.pop(key, None) is not None and record.reason is not RefusalReason.WRITER_STOPPED:
            self.world.tell_failed(key, "decode")

    def keep(self, key: AttemptKey, index: int, page: int) -> None:
        """A verified page enters the prefix cache."""
        contents = tuple(self.memory[layer, page] for layer in range(NUM_LAYERS))
        wanted = tuple((key, layer, index) for layer in range(NUM_LAYERS))
        assert contents == wanted, f"kept what was never sealed: {contents}"
        self.pool.admit([page])
        self.publish(key, index, page)
        self.pool.release([page])

    def publish(self, key: AttemptKey, index: int, page: int) -> None:
        self.pool.publish(page, page_key(key, index))
        self.kept[page] = tuple(self.memory[layer, page] for layer in range(NUM_LAYERS))

    def grant_next(self) -> None:
        key = self.queue[0]
        cached = self.pool.acquire([page_key(key, index) for index in range(PROMPT_PAGES - 1)])
        pages = self.pool.reserve(PROMPT_PAGES - len(cached))
        if pages is None:
            self.pool.release(cached)
            return
        self.queue.pop(0)
        for page in pages:
            assert page not in self.owner, f"page {page} has an owner"
            for layer in range(NUM_LAYERS):
                self.memory[layer, page] = "old bytes"
        self.cached[key] = cached
        self.world.count["cache hit"] += bool(cached)
        epoch = self.machine._epoch + 1
        self.owner |= dict.fromkeys(pages, f"{self.name}/{epoch}")
        self.happened(rx.ReservationGranted(key, tuple(pages), len(cached)))

    def verify(self) -> None:
        asked = self.to_verify.pop(0)
        is_part = isinstance(asked, rx.VerifyPart)
        digests = asked.part.digests if isinstance(asked, rx.VerifyPart) else asked.digests
        if not is_part:
            for page in asked.pages:
                assert self.owner.get(page) == asked.grant_id, "pages were given away while they were read"
        wrong = tuple(
            (layer, page)
            for layer, of_layer in enumerate(digests)
            for page, wanted in zip(asked.pages, of_layer, strict=True)
            if digest(self.memory[layer, page]) != wanted
        )
        self.world.count["digest mismatch"] += bool(wrong)
        if isinstance(asked, rx.VerifyPart):
            self.happened(rx.PartVerified(asked.grant_id, asked.part, wrong))
        else:
            self.happened(rx.DigestsVerified(asked.grant_id, wrong))

    def admit(self, grant: Grant, commit: Commit) -> None:
        key, record = grant.key, self.machine.record(grant.key)
        said = (commit.grant_id, commit.key, commit.epoch, commit.receiver, commit.pages, commit.layout)
        assert said == (grant.grant_id, key, grant.epoch, self.name, grant.pages, LAYOUT), "another grant's commit"
        assert record is not None
        assert commit.sender == record.sender, "admitted what another writer committed"
        assert all(self.owner.pop(page) == grant.grant_id for page in grant.pages), "admitted what was not granted"
        self.pool.admit(grant.pages)
        for index, page in enumerate(grant.pages, start=grant.first_page):
            self.check_untouchable(grant.grant_id, page)
            for layer in range(NUM_LAYERS):
                assert self.memory[layer, page] == (key, layer, index), "admitted what was never sealed"
            if index < PROMPT_PAGES - 1:
                self.publish(key, index, page)
        cached = self.cached.pop(key)
        for page in cached:
            contents = tuple(self.memory[layer, page] for layer in range(NUM_LAYERS))
            assert contents == self.kept[page], "a cached page was overwritten"
        self.world.admitted.add(key)
        pages, output = [*cached, *grant.pages], self.wanted.pop(key, None)
        if output is None:  # cancelled while the commit was on its way
            self.pool.release(pages)
            return
        self.running[key] = (pages, list(output) or [commit.first_tokens[0].token_id])
        self.world.tell_admitted(key)

    def generate(self, key: AttemptKey) -> None:
        """One step of one request that runs."""
        pages, output = self.running[key]
        token_id, index = self.world.sample(tuple(output)), len(output)
        output.append(token_id)
        ended = "length" if index == NUM_TOKENS - 1 else None
        self.world.tell_token(TokenGiven(key.attempt, 0, index, token_id, ended), key)
        if ended:
            del self.running[key]
            self.pool.release(pages)

    def take_bytes(self, write: Write, index: int, moved: PageWrite, contents: Bytes) -> None:
        page, grant_id = moved.remote_page, write.grant.grant_id
        state = self.pool.state(page)
        what = f"{write.prefill.name} wrote into page {page}, which is {state.value} and {self.owner.get(page)}'s"
        assert self.owner.get(page) == grant_id, what
        assert state in (PageState.RESERVED, PageState.QUARANTINED), what
        record = self.machine.record(write.key)
        assert record is not None, what
        assert index not in record.verified, f"page {page} was written after it was verified"
        assert record.state is not GrantState.VERIFYING, f"page {page} was written after its commit"
        self.memory[moved.layer, page] = contents

    def free(self, grant_id: str | None, pages: tuple[int, ...]) -> None:
        for page in pages:
            assert grant_id is None or self.owner[page] == grant_id, f"page {page} is {self.owner[page]}'s"
            self.check_untouchable(grant_id, page)

    def check_untouchable(self, grant_id: str | None, page: int) -> None:
        """The page leaves its grant: no write of a living process may still land in it."""
        for prefill in self.world.prefills:
            for write in prefill.writes:
                late = write.grant.grant_id == grant_id and write.may_land_in(page)
                assert not late, f"page {page} was freed while {prefill.name} may still write it"
        self.owner.pop(page, None)


def page_key(key: AttemptKey, index: int) -> bytes:
    return f"{key.request_id}/{index}".encode()
