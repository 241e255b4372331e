"""One sender's link to one receiver: whose turn it is to post, and which write is overdue. Pure.

Several handoffs share a link. While its window is full they wait, and then take turns, a write each. A write's turn on
the wire comes when what was posted before it has completed; from then on it has the time that its size needs, and the
time-out. So a slow link delays, and only a link that carries nothing fails.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from kvtransfer.protocol.link_window import LinkLimits, LinkWindow
from kvtransfer.protocol.messages import AttemptKey


@dataclass(slots=True)
class _Write:
    """One that is under way."""

    num_bytes: int
    posted_s: float
    turn_s: float  # when its turn on the wire came, as far as that has happened
    was_alone: bool  # nothing was under way when it was posted


@dataclass(frozen=True, slots=True)
class Overdue:
    """What time alone has ended.

    Attributes:
        keys: handoffs with an overdue write; where the link carries nothing, all that use it or wait for it.
    """

    keys: tuple[AttemptKey, ...]
    detail: str


class Link:
    """Attributes:
    window: the bytes under way.
    used_s: when something was posted last.
    """

    def __init__(self, limits: LinkLimits) -> None:
        self.window = LinkWindow(limits)
        self.used_s = 0.0
        # Invariant: all and only handoffs that have something to post, in the order of their turns.
        self._waiting: OrderedDict[AttemptKey, None] = OrderedDict()
        # In the order of posting. Invariant: their bytes add up to the window's.
        self._under_way: OrderedDict[tuple[AttemptKey, int], _Write] = OrderedDict()
        self._completed_s = 0.0  # when the last write did

    # ---- whose turn it is

    def want(self, key: AttemptKey) -> None:
        """A handoff has something to post; it keeps its place if it waits already."""
        self._waiting.setdefault(key)

    def leave(self, key: AttemptKey) -> None:
        """It has nothing to post any more."""
        self._waiting.pop(key, None)

    def next_turn(self) -> tuple[AttemptKey, int] | None:
        """Who may post a write now, of at most how many bytes; who has more to post asks again. `None`: nobody."""
        if not self._waiting or not self.window.ask_room():
            return None
        key, _ = self._waiting.popitem(last=False)
        return key, self.window.write_bytes

    # ---- what becomes of a write

    def post(self, key: AttemptKey, write_id: int, num_bytes: int, now_s: float) -> None:
        """It is handed to the transport."""
        self._under_way[key, write_id] = _Write(num_bytes, now_s, now_s, was_alone=not self.window.num_bytes)
        self.window.acquire(num_bytes, now_s)
        self.used_s = now_s

    def complete(self, key: AttemptKey, write_id: int, now_s: float) -> None:
        """All its bytes have arrived; the turn of those behind it has come."""
        self._completed_s = now_s
        behind = self._behind(key, write_id)
        write = self._under_way.pop((key, write_id), None)
        if write is None:
            return  # it was overdue
        if behind is not None:
            behind.turn_s = now_s
        self.window.complete(
            write.num_bytes, now_s, alone_s=now_s - write.posted_s if write.was_alone else None
        )

    def fail(self, key: AttemptKey, write_id: int) -> None:
        """It will not complete."""
        behind = self._behind(key, write_id)
        write = self._under_way.pop((key, write_id), None)
        if write is not None:
            self._pass_turn(write, behind)
            self.window.forget(write.num_bytes)

    def close(self) -> None:
        """The connection was closed: nothing is under way any more."""
        self._under_way.clear()
        self.window.forget(self.window.num_bytes)

    def _behind(self, key: AttemptKey, write_id: int) -> _Write | None:
        """The write that was posted after this one. Writes complete nearly in their order, so it is found at once."""
        names = iter(self._under_way)
        for name in names:
            if name == (key, write_id):
                follower = next(names, None)
                return None if follower is None else self._under_way[follower]
        return None

    @staticmethod
    def _pass_turn(write: _Write, behind: _Write | None) -> None:
        """Turns are kept with the first write that they are the turn of: what is behind it has no earlier one."""
        if behind is not None:
            behind.turn_s = max(behind.turn_s, write.turn_s)

    # ---- time

    def next_deadline_s(self) -> float | None:
        """When `find_overdue` may find something; `None`: nothing is under way."""
        first = next(iter(self._under_way.values()), None)
        return None if first is None else first.turn_s + self.window.allowed_s(first.num_bytes)

    def find_overdue(self, now_s: float) -> Overdue | None:
        """Those whose writes have had their time. These writes count as under way no more."""
        keys: OrderedDict[AttemptKey, None] = OrderedDict()
        is_dead, waited_s = False, 0.0
        while (due_s := self.next_deadline_s()) is not None and now_s >= due_s:
            (key, _), write = self._under_way.popitem(last=False)
            self._pass_turn(write, next(iter(self._under_way.values()), None))
            self.window.forget(write.num_bytes)
            keys.setdefault(key)
            waited_s = max(waited_s, now_s - write.turn_s)
            is_dead |= self._completed_s <= write.turn_s  # not a single one since
        if not keys:
            return None
        if is_dead:
            # Nothing has arrived since: who waits for room would wait for the same again.
            keys.update(dict.fromkeys(key for key, _ in self._under_way))
            keys.update(self._waiting)
        return Overdue(tuple(keys), f"a write has not arrived within {waited_s:.1f} s of its turn")
