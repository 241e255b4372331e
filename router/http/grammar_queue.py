"""Whose new grammar is tried next: clients take turns, and each has one under way at most. Pure."""

from __future__ import annotations

from collections import OrderedDict, deque


class GrammarQueue:
    """Trials that wait, by client.

    A client's first trial begins after at most one of each other client that waits, and of those under way, so whoever
    asks for many, or for such as take long, holds up itself.

    A client may have as many trials here as there are places free. So a few clients, however much they ask for, leave
    as many places as each of them has: with `k` of them that is one in `k + 1` (Choudhury and Hahne, "Dynamic queue
    length thresholds for shared-memory packet switches", 1998).

    Args:
        num_at_once: trials under way, of all clients.
        max_of_one, max_waiting: trials that one client, and all, may have here, those under way included.
    """

    def __init__(self, num_at_once: int, max_of_one: int, max_waiting: int) -> None:
        self._num_at_once = num_at_once
        self._max_of_one, self._max_waiting = max_of_one, max_waiting
        # All and only clients with a trial that waits, in the order of their turns.
        self._waiting: OrderedDict[str, deque[bytes]] = OrderedDict()
        self._running: dict[str, bytes] = {}
        # Trials that have been asked for and have not ended. What a line has beside them is passed over.
        self._asked: set[bytes] = set()

    def enter(self, client: str, trial: bytes) -> bool:
        """Let it wait; it may wait for others already, and then begins with whoever is first. `False`: too many do."""
        line = self._waiting.get(client, ())
        if self.is_running(trial) or (trial in line and trial in self._asked):
            return True
        num_free = self._max_waiting - len(self._asked)
        if trial not in line and len(line) + (client in self._running) >= min(self._max_of_one, max(num_free, 1)):
            return False
        if trial not in self._asked and num_free < 1:
            return False
        self._asked.add(trial)
        if trial not in line:  # else it was tried at another client's turn, and keeps its place for this time
            self._waiting.setdefault(client, deque()).append(trial)
        return True

    def leave(self, client: str, trial: bytes, *, is_wanted: bool) -> None:
        """The client waits for it no more; `is_wanted`: another one does. What is under way goes on until it ends."""
        if (line := self._waiting.get(client)) is not None and trial in line:
            line.remove(trial)
            if not line:
                del self._waiting[client]
        if not is_wanted and not self.is_running(trial):
            self._asked.discard(trial)

    def is_running(self, trial: bytes) -> bool:
        return trial in self._running.values()

    def will_be_tried(self, trial: bytes) -> bool:
        """Whether it is under way, or waits in somebody's line."""
        return self.is_running(trial) or any(trial in line for line in self._waiting.values())

    def begin(self) -> tuple[str, bytes] | None:
        """The next trial, with the client whose turn it is; `None`: none may begin."""
        if len(self._running) >= self._num_at_once:
            return None
        while (client := next((each for each in self._waiting if each not in self._running), None)) is not None:
            trial = self._first_of(client)
            if trial in self._asked and not self.is_running(trial):
                self._running[client] = trial
                return client, trial
        return None

    def _first_of(self, client: str) -> bytes:
        """Take the first of a client's line, and put the client last."""
        line = self._waiting.pop(client)
        trial = line.popleft()
        if line:
            self._waiting[client] = line
        return trial

    def end(self, client: str) -> None:
        """The client's trial has ended."""
        self._asked.discard(self._running.pop(client))
        if client in self._waiting:  # behind all that have come meanwhile
            self._waiting.move_to_end(client)
