"""Requests wait here until it is their turn to be placed: the queue (`router.policy.turns`) behind its gate, and beside
those of other routers (`router.policy.other_turns`)."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Protocol
from uuid import uuid4

from router.policy.first_token import first_token_in_s, slack_of
from router.policy.gate import Room, UnderWay
from router.policy.other_turns import OtherTurns, TurnNews
from router.policy.turns import TurnQueue, Waiting
from router.request.events import TurnCame
from router.request.request import Request
from tandem.core.clock import Clock

_WEIGHT = 1 / 16  # of the newest prompt


class Inbox(Protocol):
    """Of whoever waits: a `Mailbox` of events."""

    def put(self, item: TurnCame, /) -> object: ...


class Turns:
    """Of one router. Not thread-safe.

    Attributes:
        on_news: called whenever there may be something to tell other routers.
    """

    def __init__(self, room: Callable[[], Room], ageing_s: float, clock: Clock) -> None:
        """`room`: what the workers can take now. `ageing_s`: as of `TurnQueue`."""
        self.on_news: Callable[[], None] = lambda: None
        self._room = room
        self._clock = clock
        self._queue = TurnQueue(ageing_s)
        self._others = OtherTurns(self._queue, uuid4().hex)
        self._under_way = UnderWay()
        # Of prompts that were begun: the share that was to be computed, as the newest count most.
        self._computed_share = 1.0
        self._place_s = 0.0  # that a sequence keeps a place in decode's batch, as the newest count most; 0: not known
        # Invariant: has those that wait, by their entries in the queue.
        self._waiting: dict[Waiting, Turn] = {}

    def first_token_in_s(self, request: Request, num_held_tokens: int, place_in_s: float) -> float:
        """When a request that comes now would have its first token, as far as can be told.

        Args:
            num_held_tokens: of its prompt, that some worker has in its cache.
            place_in_s: as of `router.policy.first_token`.
        """
        tenant = request.tenant
        in_front = self._under_way.tokens_ahead + self._queue.tokens_in_front(tenant.owner, tenant.weight)
        to_compute = len(request.prompt_ids) - num_held_tokens
        room = self._room()
        # Its own tokens are known to be in no cache; of those in front as many are as lately were.
        return first_token_in_s(in_front * self._computed_share, to_compute, place_in_s, room)

    @property
    def num_waiting_tokens(self) -> int:
        """Of the prompts that wait."""
        return self._queue.num_tokens

    @property
    def computed_share(self) -> float:
        """Of the prompts that were begun lately, the share that was in no cache."""
        return self._computed_share

    @property
    def num_waiting_tokens_to_compute(self) -> float:
        """Of the prompts that wait here for workers which compute prompts."""
        return 0.0 if self._is_held_by_decode else self._queue.num_tokens * self._computed_share

    @property
    def num_held_for_decode(self) -> int:
        """Requests that wait here because decode has no places or pages for them."""
        return self._queue.num_waiting if self._is_held_by_decode else 0

    @property
    def _is_held_by_decode(self) -> bool:
        return self._queue.num_waiting > 0 and not self._under_way.has_enough_ahead(self._room())

    def join(self, request: Request, inbox: Inbox) -> Turn:
        """`inbox` gets `TurnCame` when the turn has come, unless it has come at once."""
        turn = Turn(self, request, inbox, self._slack_s(request))
        self._queue.enter(turn.entry, self._others.elsewhere(self._clock.now()))
        self._waiting[turn.entry] = turn
        self.look()
        self.on_news()
        return turn

    def _slack_s(self, request: Request) -> float:
        num_tokens = round(self._computed_share * len(request.prompt_ids))
        return slack_of(num_tokens, self._room().tokens_per_s, request.timeout_s)

    def look(self) -> None:
        """Place as many as there is room for. Called whenever something has got on, ended or changed.

        The oldest of a tenant, whose turn it is, holds nobody up that is due sooner: it may be a long prompt behind
        others.
        """
        if not self._queue.num_waiting:
            return
        room = self._room()
        room = replace(room, tokens_per_s=room.tokens_per_s / self._computed_share, place_s=self._place_s)
        while (entry := self._queue.first()) is not None:
            if self._is_behind(entry, room):
                return
            if not self._may_follow(entry, room):
                entry = self._queue.first(oldest=False)
                if entry is None or self._is_behind(entry, room) or not self._may_follow(entry, room):
                    return
            self._queue.take(entry)
            self._waiting.pop(entry).come(self._under_way)

    def _may_follow(self, entry: Waiting, room: Room) -> bool:
        return self._under_way.may_follow(entry.num_tokens, entry.num_sequences, room, entry.turn)

    def _is_behind(self, entry: Waiting, room: Room) -> bool:
        """Whether others have their turns first, at other routers."""
        if not room.num_computing or (entry.num_sequences and not room.num_decode):
            return False  # without workers it is to find that out
        return self._others.go_first(entry, self._clock.now())

    # -- other routers

    @property
    def num_waiting(self) -> int:
        """Requests."""
        return self._queue.num_waiting

    def tell(self) -> TurnNews:
        """What other routers are to know; all of them are to be told it."""
        return self._others.tell()

    def hear(self, router: str, news: TurnNews) -> None:
        """Another router, of this name, has told that."""
        self._others.hear(router, news, self._clock.now())
        self.look()

    # -- one request

    def leave(self, turn: Turn) -> None:
        """The request has ended."""
        self._queue.leave(turn.entry)
        self._waiting.pop(turn.entry, None)

    def note_computed(self, num_tokens: int, num_cached_tokens: int) -> None:
        share = max(1, num_tokens - num_cached_tokens) / max(1, num_tokens)
        self._computed_share += _WEIGHT * (share - self._computed_share)

    def note_place(self, seconds: float) -> None:
        """A sequence has had a place in decode's batch for so long."""
        self._place_s += (_WEIGHT if self._place_s else 1.0) * (seconds - self._place_s)

    def charge(self, given: Iterable[tuple[Turn, int]]) -> None:
        """So many tokens were given out to each."""
        sums: dict[tuple[str, str], int] = {}
        entries: dict[tuple[str, str], Waiting] = {}
        for turn, num_tokens in given:
            entry = turn.entry
            whose = (entry.owner, entry.session)
            sums[whose] = sums.get(whose, 0) + num_tokens
            entries[whose] = entry
        for whose, num_tokens in sums.items():
            self._queue.charge(entries[whose], num_tokens)
        self.on_news()


class Turn:
    """One request's."""

    def __init__(self, turns: Turns, request: Request, inbox: Inbox, slack_s: float) -> None:
        """`slack_s`: of its prompt; a long one is due later (`router.policy.first_token`)."""
        self.entry = Waiting(
            owner=request.tenant.owner,
            weight=request.tenant.weight,
            priority=request.priority,
            session=request.session,
            due_s=request.due_s + slack_s,
            turn=request.arrived_s + slack_s,
            arrived_s=request.arrived_s,
            num_tokens=len(request.prompt_ids),
            num_sequences=0 if request.pools else request.num_choices,
        )
        self.has_come = False
        self._turns, self._inbox = turns, inbox
        self._under_way: UnderWay | None = None
        # Whether it counts among those whose prompt is not begun, and among those that wait for pages.
        self._is_ahead = self._is_ungranted = False

    def come(self, under_way: UnderWay) -> None:
        """It is to be placed now, and counts in `under_way` until it ends."""
        self.has_come, self._under_way = True, under_way
        self._is_ahead, self._is_ungranted = True, self.entry.num_sequences > 0
        under_way.num_requests += 1
        under_way.num_sequences += self.entry.num_sequences
        under_way.num_ahead += 1
        under_way.tokens_ahead += self.entry.num_tokens
        under_way.num_ungranted += self._is_ungranted
        insort(under_way.turns_ahead, self.entry.turn)
        self._inbox.put(TurnCame())

    def begun(self, num_cached_tokens: int) -> None:
        """A worker computes its prompt, of which it has so many tokens."""
        if self._forget_ahead():
            self._turns.note_computed(self.entry.num_tokens, num_cached_tokens)
            self._turns.look()

    def held_up(self) -> None:
        """No worker that is heard has its prompt, which keeps none busy: the next one does not wait for it."""
        if self._forget_ahead():
            self._turns.look()

    def granted(self) -> None:
        """Decode has pages for it."""
        if self._forget_ungranted():
            self._turns.look()

    def charge(self, num_tokens: int) -> None:
        """So many tokens were given out."""
        self._turns.charge([(self, num_tokens)])

    def had_place(self, seconds: float) -> None:
        """A sequence of it has ended that generated for so long."""
        self._turns.note_place(seconds)

    def end(self) -> None:
        """It has ended, whether its turn had come or not."""
        self._turns.leave(self)
        if self._under_way is not None:
            self._forget_ahead()
            self._forget_ungranted()
            self._under_way.num_requests -= 1
            self._under_way.num_sequences -= self.entry.num_sequences
            self._under_way = None
        self._turns.look()

    def _forget_ahead(self) -> bool:
        if self._under_way is None or not self._is_ahead:
            return False
        self._is_ahead = False
        self._under_way.num_ahead -= 1
        self._under_way.tokens_ahead -= self.entry.num_tokens
        turns = self._under_way.turns_ahead
        del turns[bisect_left(turns, self.entry.turn)]
        return True

    def _forget_ungranted(self) -> bool:
        if self._under_way is None or not self._is_ungranted:
            return False
        self._is_ungranted = False
        self._under_way.num_ungranted -= 1
        return True
