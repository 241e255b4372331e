"""A decode worker of the world: the real protocol machine and real page accounting, its memory pretended.

It checks, whatever the adversary does, that

- an extent only ever lands in a page that its own grant holds, and never after it was verified,
- no page is freed, kept or admitted while a living writer's posted write may still land in it,
- what is admitted, or kept as a cached page, is what was sealed; and it was committed for this very grant.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvtransfer.extents import PageWrite
from kvtransfer.protocol import receiver_events as rx
from kvtransfer.protocol import sender_events as tx
from kvtransfer.protocol.arrivals import ArrivedDigests
from kvtransfer.protocol.grants import GrantState, ReceiverLimits
from kvtransfer.protocol.messages import AttemptKey, Commit, Grant, RefusalReason
from kvtransfer.protocol.receiver import ReceiverHandoffs
from router.request.request import TokenGiven
from tandem.core.pages import PagePool, PageState
from tests.support.protocol_client import NUM_TOKENS
from tests.support.protocol_prefill import NUM_LAYERS, POOL_PAGES, PROMPT_PAGES, Bytes, Write, digest
from tests.support.scripted_model import LAYOUT

if TYPE_CHECKING:
    from tests.support.protocol_world import World

RECEIVER_LIMITS = ReceiverLimits(lease_s=5, grace_s=2, ask_again_s=1, remember_s=5, quarantine_cap_pages=99)


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
        self.arrived: dict[str, ArrivedDigests] = {}  # by grant
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
            case rx.ExpectWrites(grant_id, _, pages):
                self.arrived[grant_id] = ArrivedDigests(pages, NUM_LAYERS)
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
        if isinstance(asked, rx.VerifyPart):
            first_index, digests = asked.part.first_index, asked.part.digests
        else:
            first_index, digests = 0, asked.digests
            for page in asked.pages:
                assert self.owner.get(page) == asked.grant_id, "pages were given away while they were read"
        wrong: tuple[tuple[int, int], ...] = ()
        if len(digests) == NUM_LAYERS:  # others the machine lets through without its guard only: `admit` sees it
            wrong = self.arrived[asked.grant_id].find_mismatches(first_index, digests, self.take_digests)
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

    def hear_arrival(self, write: Write) -> None:
        """Its tag is delivered with each extent that lands: too early for the others."""
        arrived = self.arrived.get(write.grant.grant_id)
        if arrived is not None:
            assert arrived.covers(write.runs)
            arrived.read(write.runs, self.take_digests)

    def take_digests(self, parts: Sequence[tuple[int, Sequence[int]]]) -> list[tuple[int, ...]]:
        return [tuple(digest(self.memory[layer, page]) for page in pages) for layer, pages in parts]

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
