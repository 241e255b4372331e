"""When nothing that a writer has sent is on its way any more, after its process has ended or its connection was closed.
Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

# How long bytes of a writer on this host may still arrive after its process has ended. Over TCP the kernel goes on
# sending, and bytes stay in socket buffers until the transport is polled: in a measurement 7.7 MB of one write landed
# with the first poll after the writer's exit. Between hosts a kernel repeats lost packets for longer; there the whole
# grace time must pass.
IN_FLIGHT_S = 0.5


@dataclass(frozen=True, slots=True)
class IdleWord:
    """A writer's word that nothing of a grant is outstanding."""

    grant_id: str
    sender: str
    capability: bytes


@dataclass(slots=True)
class _ClosedLink:
    """A connection that broke between two living workers, closed at both ends.

    Attributes:
        due_s: from when on none of its bytes can be on their way.
        words: what its writer has said since, until it has closed the next one; taken up when this one is due.
    """

    due_s: float
    words: dict[IdleWord, None] = field(default_factory=dict)


class Landing:
    """Writers, by incarnation, of which bytes may be on their way.

    Args:
        grace_s: the time of grace.
    """

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._exited: dict[str, float] = {}  # when the exit becomes a fence
        # Each connection of its own, the oldest first: else what is said would wait for a link that breaks again and
        # again. Invariant: no empty ones.
        self._closed: dict[str, deque[_ClosedLink]] = {}

    def exit(self, sender: str, now_s: float, *, is_here: bool) -> None:
        """Its process has ended; `is_here`: it ran on this host."""
        self._exited.setdefault(sender, now_s + self._in_flight_s(is_here))

    def close_link(self, sender: str, now_s: float, *, is_here: bool) -> None:
        """Its connection was closed at both ends; it lives."""
        closed = _ClosedLink(now_s + self._in_flight_s(is_here))
        self._closed.setdefault(sender, deque()).append(closed)

    def _in_flight_s(self, is_here: bool) -> float:
        return IN_FLIGHT_S if is_here else max(IN_FLIGHT_S, self._grace_s)

    def hold(self, word: IdleWord) -> bool:
        """Whether bytes of what this speaks of may be on their way; it is kept for when they cannot be any more."""
        closed = self._closed.get(word.sender)
        if closed is None:
            return False
        closed[-1].words[word] = None
        return True

    def take_exited(self, now_s: float) -> list[str]:
        """Writers whose exit is a fence now."""
        due = [sender for sender, due_s in self._exited.items() if now_s >= due_s]
        for sender in due:
            del self._exited[sender]
        return due

    def take_landed(self, now_s: float) -> list[IdleWord]:
        """Words that count from now on."""
        words = list[IdleWord]()
        for sender, closed in list(self._closed.items()):
            while closed and now_s >= closed[0].due_s:
                words += closed.popleft().words
            if not closed:
                del self._closed[sender]
        return words

    def deadlines_s(self) -> Iterator[float]:
        """When something becomes due."""
        yield from self._exited.values()
        yield from (closed[0].due_s for closed in self._closed.values())
