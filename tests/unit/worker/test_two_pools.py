"""Prefill's scheduler and decode's reservations together, without models: whatever is asked of them, all ends.

Each prefill worker computes prompts into its pool; each decode worker grants pages, takes handoffs and generates. What
is between them is a script that delivers grants and acknowledgements late. Nothing may wait for ever, however small
the pools and whatever the priorities and the order of arrival.
"""

from __future__ import annotations

import itertools
import random
from abc import ABC, abstractmethod
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decode_worker.ledger import Attempt, AttemptState, Ledger
from kvtransfer.protocol.messages import AttemptKey
from tandem.core.pages import PagePool, page_keys, pages_for
from tandem.core.sampling import SamplingParams
from tandem.worker.scheduler import BatchScheduler, SchedulerLimits
from tandem.worker.sequence import Sequence
from tandem.worker.turn import turn_of

PAGE = 4
SALT = b"m"


@dataclass(eq=False)
class Request:
    name: str
    priority: int
    prompt: list[int]
    num_output: int
    num_choices: int
    prefill: Prefill
    decode: Decode
    ageing_s: float = 1000.0
    sequence: Sequence | None = None  # at prefill
    attempt: Attempt | None = None  # at decode
    computed: bool = False
    choices: list[Sequence] = field(default_factory=list)  # at decode
    ended: bool = False

    @property
    def key(self) -> AttemptKey:
        return AttemptKey(self.name, 1)

    def turn(self, arrival: int) -> float:
        """At a worker whose clock says so when it comes."""
        return turn_of(self.priority, arrival, self.ageing_s)

    def make_sequence(self, arrival: int, choice: int, output: list[int], pages: list[int]) -> Sequence:
        return Sequence(
            request_id=self.name,
            attempt=1,
            choice=choice,
            turn=self.turn(arrival),
            arrival=arrival,
            token_ids=self.prompt + output,
            num_prompt=len(self.prompt),
            params=SamplingParams(),
            num_computed=len(self.prompt) if pages else 0,
            pages=pages,
            owner=self,
        )


class Pool(ABC):
    """One worker: a scheduler over a pool."""

    def __init__(self, num_pages: int, *, seqs: int, cache: bool, share: float = 1.0) -> None:
        limits = SchedulerLimits(seqs, 16, 8, 100, share)
        self.pool = PagePool(num_pages, PAGE)
        self.scheduler = BatchScheduler(self.pool, limits, salt=SALT, prefix_cache=cache)
        self.arrivals = itertools.count()

    @abstractmethod
    def step(self) -> bool:
        """Compute one batch, if there is anything to compute; whether there was."""

    def assert_empty(self) -> None:
        self.pool.check()
        counts = self.pool.counts()
        assert counts.used == counts.reserved == 0, counts
        scheduler = self.scheduler
        assert not scheduler.running
        assert not scheduler.waiting
        assert not scheduler.parked


class Prefill(Pool):
    def start(self, request: Request) -> None:
        request.sequence = request.make_sequence(next(self.arrivals), 0, [], [])
        self.scheduler.add(request.sequence)

    def step(self) -> bool:
        batch = self.scheduler.schedule()
        self.scheduler.apply(batch, [[7]] * sum(item.samples for item in batch.items))
        for preempted in batch.preempted:
            assert not preempted.promoted, "decode's pages wait for it: it must not lose its own"
            preempted.owner.computed = False
        for item in batch.items:
            if item.start + item.num_tokens == item.sequence.num_prompt:
                del item.sequence.token_ids[item.sequence.num_prompt :]
                self.scheduler.park(item.sequence)
                item.sequence.owner.computed = True
        return bool(batch.items)

    def leave(self, request: Request) -> None:
        assert request.sequence is not None
        self.pool.release(self.scheduler.remove(request.sequence))


class Decode(Pool):
    def __init__(self, num_pages: int, *, seqs: int, cache: bool) -> None:
        super().__init__(num_pages, seqs=seqs, cache=cache)
        self.ledger = Ledger[Attempt](self.scheduler, bound=100)
        self.requests: dict[AttemptKey, Request] = {}

    def reserve(self, request: Request) -> None:
        self.requests[request.key] = request
        keys = tuple(page_keys(request.prompt, PAGE, SALT)) if self.scheduler.prefix_cache else ()
        arrival = next(self.arrivals)
        request.attempt = Attempt(
            key=request.key,
            turn=request.turn(arrival),
            arrival=arrival,
            num_tokens=len(request.prompt),
            num_running=request.num_choices,
            page_keys=keys,
        )
        self.ledger.push(request.attempt)

    def pump(self) -> list[Request]:
        """Requests that have pages from now on."""
        fresh = []
        while (granted := self.ledger.take()) is not None:
            assert granted.state is AttemptState.GRANTED
            fresh.append(self.requests[granted.key])
        return fresh

    def admit(self, request: Request) -> None:
        granted = request.attempt
        assert granted is not None
        self.ledger.admit(granted)
        pages = [*granted.cached, *granted.pages]
        for choice in range(request.num_choices):
            if choice:
                self.pool.share(pages)
            sequence = request.make_sequence(granted.arrival, choice, [7], list(pages))
            sequence.num_published = len(granted.cached)
            request.choices.append(sequence)
            self.scheduler.enter(sequence)
        self.ledger.remove(granted)

    def step(self) -> bool:
        batch = self.scheduler.schedule()
        self.scheduler.apply(batch, [[7]] * sum(item.samples for item in batch.items))
        for item in batch.items:
            request: Request = item.sequence.owner
            if item.sequence.num_output >= request.num_output:
                self.pool.release(self.scheduler.remove(item.sequence))
                request.choices.remove(item.sequence)
                request.ended = not request.choices
        return bool(batch.items)

    def cancel(self, request: Request) -> None:
        attempt = request.attempt
        if attempt is not None and attempt.state is AttemptState.GRANTED:
            self.ledger.end(attempt, attempt.pages, (), quarantined=False, keeps=True)
        elif attempt is not None:
            self.ledger.remove(attempt)
        for sequence in request.choices:
            self.pool.release(self.scheduler.remove(sequence))
        request.choices = []


class World:
    """Workers and requests; `turn` lets a random part of what could happen next happen."""

    def __init__(self, rng: random.Random, prefills: list[Prefill], decodes: list[Decode]) -> None:
        self.rng = rng
        self.prefills = prefills
        self.decodes = decodes
        self.coming: list[Request] = []
        self.live: list[Request] = []
        self.unheard: list[Request] = []  # granted, and prefill does not know

    def turn(self, *, hurry: bool) -> bool:
        """Whether anything moved. With `hurry` all that can happen does."""
        moved = False
        for decode in self.decodes:
            fresh = decode.pump()
            self.unheard += fresh
            moved |= bool(fresh)
        for happen in (self.arrive, self.hear_of_grants, self.hand_off):
            moved |= happen(hurry)
        for worker in (*self.prefills, *self.decodes):
            if hurry or self.rng.random() < 0.8:
                moved |= worker.step()
                worker.pool.check()
        self.live = [r for r in self.live if not r.ended]
        return moved

    def _now(self, hurry: bool) -> bool:
        return hurry or self.rng.random() < 0.3

    def arrive(self, hurry: bool) -> bool:
        if not self.coming or not self._now(hurry):
            return False
        request = self.coming.pop()
        # The two sides may hear in either order, and see other orders of arrival.
        request.prefill.start(request)
        request.decode.reserve(request)
        self.live.append(request)
        return True

    def hear_of_grants(self, hurry: bool) -> bool:
        heard = [r for r in self.unheard if self._now(hurry)]
        for request in heard:
            self.unheard.remove(request)
            if not request.ended:
                assert request.sequence is not None
                request.prefill.scheduler.promote(request.sequence)
        return bool(heard)

    def hand_off(self, hurry: bool) -> bool:
        ready = [r for r in self.live if r.computed and r.sequence and r.sequence.promoted and self._now(hurry)]
        for request in ready:
            request.decode.admit(request)
            request.prefill.leave(request)
            request.sequence, request.computed = None, False
        return bool(ready)

    def cancel(self, request: Request) -> None:
        if request.sequence is not None:
            request.prefill.leave(request)
            request.sequence = None
        request.decode.cancel(request)
        request.ended, request.computed = True, False


def run(world: World, *, cancels: float = 0.0) -> None:
    """Until all have ended; fails when nothing can move."""
    for _ in range(20_000):
        if not world.live and not world.coming:
            break
        if not world.turn(hurry=False) and not world.turn(hurry=True):
            pytest.fail(f"nothing moves; waiting: {[r.name for r in world.live]}, {states(world)}")
        if world.live and world.rng.random() < cancels:
            world.cancel(world.rng.choice(world.live))
            world.live = [r for r in world.live if not r.ended]
    assert not world.live, f"not ended: {[r.name for r in world.live]}"
    for worker in (*world.prefills, *world.decodes):
        worker.assert_empty()


def states(world: World) -> list[str]:
    return [
        f"running {w.scheduler.running} waiting {w.scheduler.waiting} parked {w.scheduler.parked} {w.pool.counts()}"
        for w in (*world.prefills, *world.decodes)
    ]


@pytest.mark.long
@settings(max_examples=400, deadline=None)
@given(
    seed=st.integers(0, 1 << 32),
    num_prefills=st.integers(1, 2),
    num_decodes=st.integers(1, 2),
    slack=st.tuples(st.integers(0, 8), st.integers(0, 8)),
    seqs=st.integers(1, 4),
    cache=st.booleans(),
    share=st.sampled_from([0.01, 0.5, 0.75, 1.0]),
    cancels=st.sampled_from([0.0, 0.02]),
    ageing_s=st.sampled_from([0.0, 2.5, 1000.0]),
)
def test_whatever_comes_all_end(
    seed: int, num_prefills: int, num_decodes: int, slack: tuple[int, int], seqs: int, cache: bool, share: float,
    cancels: float, ageing_s: float,
) -> None:  # fmt: skip
    """Pools from just one largest request on; random prompts (some begin alike), priorities, delays and cancels."""
    rng = random.Random(seed)
    sizes = [(rng.randint(1, 14), rng.randint(2, 10), rng.randint(1, min(2, seqs))) for _ in range(10)]
    prefill_pages = max(pages_for(p, PAGE) for p, _, _ in sizes) + slack[0]
    decode_pages = max(pages_for(p + o, PAGE) for p, o, _ in sizes) + slack[1]
    prefills = [Prefill(prefill_pages, seqs=seqs, cache=cache, share=share) for _ in range(num_prefills)]
    decodes = [Decode(decode_pages, seqs=seqs, cache=cache) for _ in range(num_decodes)]
    world = World(rng, prefills, decodes)
    world.coming = [
        Request(
            name=f"r{n}",
            priority=rng.randint(0, 2),
            prompt=[rng.randint(0, 1)] * num_prompt,
            num_output=num_output,
            num_choices=num_choices,
            prefill=rng.choice(prefills),
            decode=rng.choice(decodes),
            ageing_s=ageing_s,
        )
        for n, (num_prompt, num_output, num_choices) in enumerate(sizes)
    ]
    run(world, cancels=cancels)


def test_computed_prompts_without_a_grant_give_way_to_the_one_that_has_it() -> None:
    """Important prompts fill prefill and wait for decode, whose pages wait for an unimportant one."""
    prefill, decode = Prefill(4, seqs=4, cache=False), Decode(5, seqs=4, cache=False)
    world = World(random.Random(0), [prefill], [decode])
    low = Request("low", 5, list(range(16)), 2, 1, prefill, decode)
    decode.reserve(low)
    world.unheard += decode.pump()
    assert decode.pool.counts().reserved == 4, "no other is granted before it has been handed off"
    high = [Request(f"high{n}", 0, list(range(n, n + 8)), 2, 1, prefill, decode) for n in range(2)]
    for request in high:
        prefill.start(request)
        decode.reserve(request)
    prefill.step()
    assert [s.request_id for s in prefill.scheduler.parked] == ["high0", "high1"]
    assert not prefill.pool.num_available
    prefill.start(low)
    assert not prefill.step(), "nobody gives way before the grant is known here"
    world.live = [low, *high]
    world.hear_of_grants(True)
    assert prefill.step()
    assert [s.request_id for s in prefill.scheduler.running] == ["low"]
    assert sorted(s.request_id for s in prefill.scheduler.waiting) == ["high0", "high1"]
    run(world)
