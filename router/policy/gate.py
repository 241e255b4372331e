"""How much is placed at once: as much as keeps all workers busy, and not more. Pure.

What waits at a worker was placed by loads that have changed since, and no tenant can overtake another there. So
requests wait in the router (`router.policy.turns`), and the next one is placed as soon as it would keep a worker from
running idle:

- *Prompts*: fewer are placed and not begun than two for each worker that computes prompts, or they have fewer tokens
  than these compute in a quarter of a second. That covers the way of a message there and back many times. Prompts
  behind which it does not have to wait there do not count: long ones have later turns (`tandem.worker.turn`). Nor do
  those whose worker is silent or lost, or for which none is ready: they keep none busy.
- *Places*: not more sequences are under way than decode's batches hold, and as many more as leave their places until
  one that is placed now has its first token. Who gets its first token sooner would wait for the second; who gets it
  later leaves a place empty.
- *Pages*: where no decode worker has room for the prompt, not more than two for each wait there for pages.

Several routers divide the places evenly, and one takes besides what the others leave of theirs: connections may lie
unevenly. Where all have requests waiting, who has more than its share places nothing until it has less. Who was served
more than others places nothing either (`router.policy.other_turns`).

A router that has placed nothing places one whatever else is under way: each of its requests that ends, or gets on, is
heard of, so nothing waits for ever.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass, field

from router.policy.pool import Order, Pool
from tandem.core.layer_groups import LayerGroups

_AHEAD, _AHEAD_S = 2, 0.25


@dataclass(frozen=True, slots=True)
class Room:
    """What the workers can take.

    Attributes:
        num_computing: workers that compute prompts.
        tokens_per_s: of prompts, that one of them computes; 0: not known yet.
        num_decode: decode workers.
        num_places: sequences that decode's batches hold, of which this router may use so many.
        most_pages: that one decode worker has for another request.
        page_size: tokens in a page.
        window, num_windowed: as of `LayerGroups`.
        num_routers: that share the workers.
        place_s: that a sequence keeps its place, on average; 0: not known yet.
    """

    num_computing: int
    tokens_per_s: float
    num_decode: int
    num_places: float
    most_pages: int
    page_size: int
    num_routers: int = 1
    place_s: float = 0.0
    window: int = 0
    num_windowed: int = 0

    @classmethod
    def of(
        cls,
        prefill: Pool,
        decode: Pool,
        *,
        is_mixed: bool,
        tokens_per_s: float,
        num_places: float,
        num_routers: int = 1,
    ) -> Room:
        """What the workers of both pools can take. `is_mixed`: decode workers compute prompts too."""
        roomiest = next(decode.walk(Order.ROOM, decode.formats), None)
        return cls(
            num_computing=len(prefill) + (len(decode) if is_mixed else 0),
            tokens_per_s=tokens_per_s,
            num_decode=len(decode),
            num_places=num_places,
            most_pages=roomiest.num_available_pages if roomiest is not None else 0,
            page_size=roomiest.page_size if roomiest is not None else 0,
            num_routers=num_routers,
            window=roomiest.kv_format.layout.window if roomiest is not None else 0,
            num_windowed=roomiest.kv_format.layout.num_windowed if roomiest is not None else 0,
        )

    def num_left_in(self, seconds: float) -> float:
        """How many sequences leave their places within this time, while all places are taken."""
        return self.num_places * seconds / self.place_s if self.place_s else 0.0


def places_of_one(num_places: int, num_routers: int, num_others: int, num_apart: int = 0) -> float:
    """Of the places in decode's batches those that one router may use; of `num_others` it knows that other routers have
    requests there. Besides, those that its own sequences have at workers that get nothing new: they take none of the
    others'."""
    if not num_places:
        return 0
    own = max(num_places / num_routers, num_places - num_others) if num_routers > 1 else num_places
    return own + num_apart


@dataclass(slots=True)
class UnderWay:
    """What this router has placed, and has not ended."""

    num_requests: int = 0
    num_sequences: int = 0
    num_ahead: int = 0  # requests whose prompts are not begun
    tokens_ahead: int = 0  # of these prompts
    num_ungranted: int = 0  # requests that wait for pages at decode
    turns_ahead: list[float] = field(default_factory=list)  # of those ahead, their turns at workers; sorted

    def may_follow(self, num_tokens: int, num_sequences: int, room: Room, turn: float = math.inf) -> bool:
        """Whether a request with such a prompt is placed now.

        Args:
            num_sequences: 0 where no decode worker serves it.
            turn: of its prompt at a worker.
        """
        if not self.num_requests or not room.num_computing or (num_sequences and not room.num_decode):
            return True  # without workers it is to find that out
        share = 1 / room.num_routers
        if self.has_enough_ahead(room, turn):
            return False
        if not num_sequences:
            return True
        num_left = room.num_left_in(self._first_token_in_s(num_tokens, room))
        if self.num_sequences + num_sequences > math.ceil(room.num_places + num_left):
            return False
        return self._has_pages(num_tokens, room) or self.num_ungranted < math.ceil(_AHEAD * room.num_decode * share)

    @staticmethod
    def _has_pages(num_tokens: int, room: Room) -> bool:
        groups = LayerGroups(max(1, room.page_size), room.window, room.num_windowed)  # of no worker: no page
        return groups.num_seen(num_tokens) <= room.most_pages

    def _first_token_in_s(self, num_tokens: int, room: Room) -> float:
        """Of one that is placed now, by the prompts that go before it, its own, and the speed of prefill."""
        if not room.tokens_per_s:
            return 0.0
        return (self.tokens_ahead / (room.num_computing / room.num_routers) + num_tokens) / room.tokens_per_s

    def has_enough_ahead(self, room: Room, turn: float = math.inf) -> bool:
        """Whether prompts are placed and not begun that keep all workers busy which compute prompts, and that go before
        one with this turn."""
        share = 1 / room.num_routers
        most_ahead = math.ceil(_AHEAD * room.num_computing * share)
        most_tokens = room.tokens_per_s * _AHEAD_S * room.num_computing * share
        num_behind = len(self.turns_ahead) - bisect_right(self.turns_ahead, turn)
        return self.num_ahead - num_behind >= most_ahead and self.tokens_ahead >= most_tokens
