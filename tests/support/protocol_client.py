"""The router's side of the world: clients with the real journal, attempts, retries and time limits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtransfer.protocol.messages import AttemptKey
from router.request.journal import Journal
from router.request.request import TokenGiven

if TYPE_CHECKING:
    from tests.support.protocol_decode import Decode
    from tests.support.protocol_prefill import Prefill
    from tests.support.protocol_world import World

NUM_TOKENS = 3
MAX_ATTEMPTS = 4
SILENCE_S = 12.0  # an attempt of which nothing is heard for so long is given up


class Client:
    """One request of one choice.

    Every token that is sampled anywhere gets an id of its own, and `World.prefix_of` knows what it continues. That is
    the worst case: no two attempts ever sample alike, so whatever is not from the journal's own line is noticed.
    """

    def __init__(self, world: World, request_id: str, how: int) -> None:
        self.world = world
        self.request_id = request_id
        self.journal = Journal(1)
        self.given: list[int] = []  # what the client has read
        self.ended: str | None = None
        self.is_admitted = False
        self.heard_s = 0.0
        self.prefill: Prefill | None = None
        self.decode: Decode | None = None
        self.start(how)

    @property
    def key(self) -> AttemptKey:
        return AttemptKey(self.request_id, self.journal.attempt)

    def start(self, how: int) -> None:
        """Place the present attempt at a pair; `how` chooses."""
        world = self.world
        prefills, decodes = world.live_prefills(), world.live_decodes()
        self.prefill, self.decode = prefill, decode = prefills[how % len(prefills)], decodes[how // 2 % len(decodes)]
        self.is_admitted = False
        self.heard_s = world.now_s
        key, output = self.key, tuple(self.given)
        world.say("reserve", decode, lambda: decode.reserve(key, output))
        world.say("start", prefill, lambda: prefill.start(key, decode.name, output, how // 4))

    def take(self, token: TokenGiven) -> None:
        """A token arrives from a worker."""
        if self.ended is not None:
            return
        self.heard_s = self.world.now_s
        for ready in self.journal.accept(token):
            known = self.world.prefix_of[ready.token_id]
            assert known == tuple(self.given), f"{self.request_id} is given {known} and one more behind {self.given}"
            assert ready.index == len(self.given), f"{self.request_id} is given index {ready.index} twice or too early"
            self.given.append(ready.token_id)
        if self.journal.is_finished:
            self.end("finished")

    def admitted(self, attempt: int) -> None:
        if attempt == self.journal.attempt:
            self.is_admitted = True
            self.heard_s = self.world.now_s

    def failed(self, attempt: int, side: str) -> None:
        """A worker gave the attempt up, or is lost. What prefill says after the admission is of no account."""
        if self.ended is not None or attempt != self.journal.attempt or (side == "prefill" and self.is_admitted):
            return
        self.cancel_attempt()
        if self.journal.attempt == MAX_ATTEMPTS:
            self.end("failed")
            return
        self.world.count["retry"] += 1
        self.journal.next_attempt()
        assert self.journal.choices[0].token_ids == self.given, "the journal is not what the client has read"
        self.start(self.world.draw())

    def leave(self) -> None:
        """The client closes its connection."""
        self.cancel_attempt()
        self.end("left")

    def cancel_attempt(self) -> None:
        key, prefill, decode = self.key, self.prefill, self.decode
        if prefill is not None and decode is not None:
            self.world.say("cancel", prefill, lambda: prefill.cancel(key))
            self.world.say("cancel", decode, lambda: decode.cancel(key))

    def end(self, how: str) -> None:
        assert how != "finished" or len(self.given) == NUM_TOKENS, f"{self.request_id} was cut at {len(self.given)}"
        self.ended = how

    def pass_time(self) -> None:
        if self.ended is None and self.world.now_s >= self.heard_s + SILENCE_S:
            self.failed(self.journal.attempt, "time")
